"""Layers of a run: repeated keys, empty sections, files that are none, conf/experiment; and paths
in any setting."""

import os
import re
from contextlib import suppress
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_sv.corpus.sources.files import source_files
from lightning_sv.errors import ConfigError
from lightning_sv.experiments.spec import load_figure
from lightning_sv.lit.run_arguments import RunArguments, parse_run, run_parser
from lightning_sv.runs.directory import CONFIG, read_config
from lightning_sv.settings.overrides import parse_overrides
from lightning_sv.settings.paths import PATHS, expand_path
from lightning_sv.settings.plain_parser import PlainParser
from lightning_sv.settings.sections import SECTIONS
from lightning_sv.settings.yaml_file import read_leaves, read_yaml
from tests.conftest import CONFIG as LAYERS
from tests.conftest import Refused, argv, thinned


def layer(folder: Path, text: str) -> list[str]:
    file = folder / "layer.yaml"
    file.write_text(text)
    return [*LAYERS, "--config", str(file)]


def parsed(args: list[str]) -> RunArguments:
    """Return the settings of a run whose corpus need not exist."""
    return parse_run(args, check_corpus=False)


def test_sections_are_those_of_the_parser() -> None:
    keys = {key for key in run_parser().known_keys() if "." in key}
    assert {key.rpartition(".")[0] for key in keys} <= SECTIONS


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ("trainer: {max_steps: 5}\nmodel: {scale: hg}\ntrainer: {precision: 64}\n", "trainer", 3),
        ("model:\n  scale: llama\n  scale: llama\n", "scale", 3),
        ("trainer:\n  plugins:\n  - {a: 1,\n     a: 2}\n", "a", 4),
    ],
)
def test_read_yaml_repeated_key_is_refused_with_its_line(
    text: str, key: str, line: int, tmp_path: Path
) -> None:
    """By every reader of YAML: a run's layers, a comparison's, a run directory, a figure of the
    paper."""
    args = layer(tmp_path, text)
    (tmp_path / CONFIG).write_text(text)
    (tmp_path / "paper/budgets").mkdir(parents=True)
    (tmp_path / "paper/mine.yaml").write_text(text)
    for read in (
        lambda: parsed(args),
        lambda: read_leaves(tmp_path / "layer.yaml"),
        lambda: read_config(tmp_path),
        lambda: load_figure("mine", tmp_path),
    ):
        with pytest.raises(ValueError, match=rf"{tmp_path}.* line {line}, .*{key}"):
            read()


EMPTY = ["", "# nothing\n", "null\n", "{}\n", "model:\n  optim:\n  backbone: {}\n"]
EMPTY += [f"{key}:\n" for key in sorted(SECTIONS)]


@pytest.mark.parametrize("text", thinned(EMPTY, [*EMPTY[:2], *EMPTY[3::5]]))
def test_parse_run_empty_layer_changes_nothing(text: str, tmp_path: Path) -> None:
    assert parsed(layer(tmp_path, text)) == parsed(LAYERS)


def test_parse_run_text_next_to_an_empty_section_stays_text(tmp_path: Path) -> None:
    """A layer with an empty section is written again without it."""
    assert (
        parsed(layer(tmp_path, "data: {corpus: {dir: '1e5'}}\ntrainer:\n")).data.corpus.dir == "1e5"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: {corpus: x}", "data.corpus"),
        ("trainer: false", "trainer"),
        ("model: {unlike_any: stop, optim: {weight_deacy: 0.1}}", "model.optim.weight_decay"),
        ("model: {optim: {lr: '${nowhere.lr}'}}", "nowhere"),
        ("data: {corpus: {dir: '${SCRATCH}/r'}}", "SCRATCH"),
    ],
)
def test_parse_run_wrong_layer_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        parsed(layer(tmp_path, text))


def test_parse_run_interpolation_sees_overrides(tmp_path: Path) -> None:
    args = layer(tmp_path, "model: {optim: {weight_decay: '${model.optim.lr}'}}")
    assert parsed([*args, "--model.optim.lr", "0.007"]).model.optim.weight_decay == 0.007


def test_parse_run_config_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    """A pipe can be read once, and a run reads its files more often; nothing waits for one."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "absent.yaml", "/dev/null"):
        with pytest.raises(ValueError, match=f"--config {path}"):
            parsed([*LAYERS, "--config", str(path)])


CONF = Path(__file__).parents[2] / "conf"
FILES = sorted((CONF / "experiment").glob("*.yaml"))


def test_experiment_file_equals_its_layers() -> None:
    assert len(FILES) > 8
    for path in FILES:
        head = re.search(r"^# = (.*), scale (\w+)\.$", path.read_text(), re.MULTILINE)
        assert head is not None and f"--config {path.stem}\n" in path.read_text(), path.name
        layers = [read_yaml(CONF / f"{layer}.yaml", layer) for layer in head[1].split(" + ")]
        merged = OmegaConf.merge(*layers, {"model": {"scale": head[2]}})
        assert read_yaml(path, path.name) == OmegaConf.to_container(merged), path.name
        parsed(["--config", path.stem]).model.plan.meta()  # its strategy fits its model


def test_config_name_here_is_found_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.chdir(tmp_path)
    named = ["--config", "tiny-llama"]
    assert parsed(named).model.label == "llama"
    own = tmp_path / "conf/experiment/tiny-llama.yaml"
    own.parent.mkdir(parents=True)
    shipped = (CONF / "experiment/tiny-llama.yaml").read_text()
    own.write_text(shipped.replace("scale: llama", "scale: hg"))
    assert parsed(named).model.label == "hg"
    assert "tiny-lama" in refused("fit", "--config", "tiny-lama")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_expand_path_home_is_written_out(home: Path) -> None:
    for given, path in {"~/a": f"{home}/a", "a b": "a b", "price $5": "price $5"}.items():
        assert expand_path(given, "run_dir") == path


@pytest.mark.parametrize("given", ["", " ", "a\0b", "$SCRATCH/run"])
def test_expand_path_no_path_is_refused_by_its_key(given: str, home: Path) -> None:
    with pytest.raises(ValueError, match="run_dir"):
        expand_path(given, "run_dir")
    parser = PlainParser("report", "")
    parser.add_argument("--out", type=Path)
    with pytest.raises(ValueError, match="--out"):
        parser.parse_args(["--out", given])
    with pytest.raises(ValueError, match="--config is "):
        parse_overrides(["--config", given], "compare")


def test_parse_overrides_second_appended_list_is_refused() -> None:
    words = argv("--trainer.callbacks+=a.B --trainer.callbacks.every 2 --trainer.callbacks+=a.C")
    with pytest.raises(ValueError, match=r"--trainer\.callbacks\+ is set twice"):
        parse_overrides(words, "compare")


@pytest.mark.parametrize("key", thinned(PATHS, ["run_dir", "data.corpus.dir"]))
def test_parser_every_path_of_a_run_is_expanded(key: str, home: Path) -> None:
    """From the command line and from YAML."""
    (home / "layer.yaml").write_text(f"{key}: ~/x\n")
    for words in ([f"--{key}", "~/x"], ["--config", "~/layer.yaml"], ["--config=~/layer.yaml"]):
        assert run_parser().parse_args([*LAYERS, *words])[key] == f"{home}/x"


def test_source_files_name_with_a_comma_is_one_path(tmp_path: Path) -> None:
    named = tmp_path / "Müller, Hans/a.txt"
    other = tmp_path / "b.txt"
    for path in (named, other):
        path.parent.mkdir(exist_ok=True)
        path.write_text("text")
    for spec, found in ((named.parent, [named]), (f"{other}, {tmp_path}", [other, named])):
        assert source_files(str(spec))[0] == found


KEYS_WITHOUT_CLASS = [
    "run_dir",
    "ckpt_path",
    "json",
    "scalars",
    *(f"trainer.{key}" for key in ("logger", "callbacks", "plugins", "profiler", "accelerator")),
    "trainer.strategy",
]


@pytest.mark.parametrize("is_list", [False, True])
@pytest.mark.parametrize("key", KEYS_WITHOUT_CLASS)
def test_parse_run_builds_no_class_that_a_key_does_not_name(
    key: str, is_list: bool, tmp_path: Path
) -> None:
    """`plan` and `compare` read the keys of `fit` that they do not use."""
    evidence = tmp_path / "made"
    value = f"{{class_path: os.mkdir, init_args: {{path: {evidence}}}}}"
    with suppress(ConfigError):
        parsed([*LAYERS, f"--{key}", f"[{value}]" if is_list else value])
    assert not evidence.exists()
