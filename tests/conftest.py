"""Fixtures and matrices that several folders share."""

import gc
import itertools
import json
import logging
import os
import resource
import shlex
import shutil
import signal
import sysconfig
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from lightning_sv import Backbone, BackboneConfig, TokenDataModule
from lightning_sv.__main__ import main
from lightning_sv.corpus import CorpusConfig, prepare
from lightning_sv.log import start_logging
from lightning_sv.scale import BranchGroup
from lightning_sv.scale.strategy import AXES, PLACEMENTS

# Tests never assert on time.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
# Two files are tested at a time on two cores: a pool of compilers for each would only import torch
# once more.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

ROOT = Path(__file__).parent.parent


def named(path: Path) -> str:
    """Return the name of a test case of a file of the repository."""
    return str(path.relative_to(ROOT))


#: the layers of a run of `tiny` on this machine
SMALL_LAYERS = ("base", "optim/adamw", "schedule/cos", "trainer/cpu", "data/stdlib", "model/tiny")


def argv(text: str) -> list[str]:
    """Return the words of a command line."""
    return shlex.split(text)


def config_args(*layers: str) -> list[str]:
    """Return `--config` for each layer, the name of a file in conf/ without its suffix."""
    words: list[str] = []
    for layer in layers:
        words += ["--config", str(ROOT / f"conf/{layer}.yaml")]
    return words


#: the arguments of these layers
CONFIG = config_args(*SMALL_LAYERS)


def thinned(rows: Iterable[Any], kept: Collection[Any], *, several: bool = False) -> list[Any]:
    """Return the rows of a test matrix; `make test` runs the kept ones, `make test-all` every row.

    With `several`, a row has the values of several parameters.
    """
    marks = pytest.mark.long
    return [
        row if row in kept else pytest.param(*(row if several else (row,)), marks=marks)
        for row in rows
    ]


def is_different_model(sharing: str, placement: str, kind: str) -> bool:
    """Return if no other combination builds the same model: axes matter only for scale vectors."""
    row = PLACEMENTS[placement]
    if row.scale_in:
        return True
    return sharing == "shared" and (row.scale_out or kind == "direct")


#: every combination of the axes that builds a different model (decay does not): a new row is tested
#: without an edit
BUILDS = [
    "+".join(axes)
    for axes in itertools.product(*list(AXES.values())[:3])
    if is_different_model(*axes)
]
#: every row of every axis once, and both presets
FEW_BUILDS = (
    "shared+bp+direct",
    "shared+ap+offset",
    "hg+dp+er",
    "hg+dnp+or",
    "shared+dnp+direct",
    "shared+nop+direct",
)
EVERY_BUILD = thinned(BUILDS, FEW_BUILDS)

#: what makes a Llama a Gemma, and a small LlamaMoE whose experts' width, int(2 * 32 / 3) = 21, fits
#: no alignment
GEMMA: dict[str, Any] = {"qk_norm": True, "post_norm": True}
MOE: dict[str, Any] = {"n_expert": 6, "n_expert_active": 2}
#: what Llama 3.1 has beyond a Llama: queries that share keys and values, and a rotation for long
#: contexts
LLAMA_31: dict[str, Any] = {
    "n_head": 4,
    "n_kv_head": 2,
    "rope_theta": 5000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_context": 64,
    },
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the files that have the most slow tests, so that no worker ends alone with one."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection, which would take a tenth of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _logging() -> None:
    """Send messages to stderr and caplog, whatever an earlier test called."""
    start_logging()
    logging.getLogger("lightning_sv").propagate = True


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip run.png, a third of a short fit; fits of module-scoped fixtures and other processes
    still draw it."""
    monkeypatch.setattr("lightning_sv.plots.run_plot.draw_run", lambda run, path: None)


@pytest.fixture
def config() -> BackboneConfig:
    """Return the smallest Llama with every part."""
    return BackboneConfig(d_model=32, n_layer=2, n_head=2, vocab_size=48)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare forty modules of the standard library, about 200,000 tokens."""
    return make_corpus(tmp_path_factory.mktemp("corpus"), max_bytes=400_000)


@pytest.fixture
def data(corpus: Path) -> TokenDataModule:
    return TokenDataModule(corpus, seq_len=8, batch_size=2, val_sequences=8, seed=0)


@pytest.fixture(scope="session")
def short_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare a few of them: an epoch of `short_args` has five steps."""
    return make_corpus(
        tmp_path_factory.mktemp("short"), max_bytes=26_000, chunk_bytes=2_000, val_fraction=0.25
    )


@pytest.fixture
def copy(corpus: Path, tmp_path: Path) -> Path:
    """Return a copy of the corpus, which a test may damage."""
    return Path(shutil.copytree(corpus, tmp_path / "copy"))


def make_corpus(root: Path, *, val_fraction: float = 0.2, **settings: int) -> Path:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    config = CorpusConfig(
        dir=str(root / "shards"),
        source="files:" + ",".join(map(str, files)),
        tokenizer="bpe:300",
        val_fraction=val_fraction,
        **settings,
    )
    prepare(config, progress=False)
    return root / "shards"


@pytest.fixture
def short_args(short_corpus: Path, tmp_path: Path) -> list[str]:
    """Return the arguments of a fit with short epochs and two micro-batches per step."""
    return [
        *write_run_args(short_corpus, tmp_path),
        "--data.global_batch",
        "32",
        "--data.micro_batch",
        "16",
        "--scalars.every_n_steps",
        "4",
    ]


@pytest.fixture
def run_args(corpus: Path, tmp_path: Path) -> list[str]:
    """Return the arguments of a fit that takes seconds; the train split has at least 12 steps."""
    return write_run_args(corpus, tmp_path)


Answer = Callable[..., Any]
Refused = Callable[..., str]
Told = Callable[..., str]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    """Return a function that runs a command, asserts that it succeeds, and returns its stdout."""

    def run(*words: str) -> str:
        capsys.readouterr()
        assert main(list(words)) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def answer(told: Told) -> Answer:
    """Return a function that runs a command with `--json`, and returns its parsed output."""
    return lambda *words: json.loads(told(*words, "--json"), parse_constant=pytest.fail)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Return a function that runs a command, asserts that it is refused, and returns its stderr."""

    def run(*words: str) -> str:
        capsys.readouterr()
        assert main(list(words)) == 2
        out, err = capsys.readouterr()
        assert "error: " in err and "Traceback" not in err and "step 1/" not in out, err
        return err

    return run


def write_run_args(corpus: Path, folder: Path) -> list[str]:
    """Write the config of `run_args` and return them."""
    config = folder / "base.yaml"
    config.write_text(f"""
model:
  scale: unified
  backbone: {{name: tiny, d_model: 32, n_layer: 2, n_head: 2, vocab_size: 300}}
data:
  corpus: {{dir: {corpus}, tokenizer: "bpe:300"}}
  seq_len: 32
  global_batch: 4
  validations: 2
  val_sequences: 16
trainer: {{accelerator: cpu, devices: 1, max_steps: 12}}
scalars: {{every_n_steps: 1}}
branch_norms: {{every_n_steps: 5}}
""")
    return ["--config", str(config)]


def edit_json(file: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None takes one out."""
    written = json.loads(file.read_text()) | changes
    gone = {key for key, value in changes.items() if value is None}
    file.write_text(json.dumps({key: value for key, value in written.items() if key not in gone}))


@contextmanager
def file_size_limit(n_bytes: int) -> Iterator[None]:
    """Let the kernel refuse larger files, as it refuses to write to a full disk.

    Python ignores the signal of a file that is too large.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def is_running(pid: int | str) -> bool:
    """Return True for a process that exists and has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # the zombie of a parent that does not wait


def listen_to_interrupts() -> None:
    """Restore SIGINT, which a shell ignores for background processes; for `preexec_fn`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def gammas(group: BranchGroup, name: str) -> list[Tensor | None]:
    """Return the (input-side, output-side) gamma of a branch, shared or own."""
    return [None if vector is None else vector() for vector in group.vectors(name)]


def perturbed(model: Backbone, size: float = 0.3) -> Backbone:
    """Move every parameter, so that no scale vector is 1."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                size * torch.rand_like(parameter) * parameter.abs().mean().clamp(min=0.3)
            )
    return model
