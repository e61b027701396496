"""The Makefile: variables of each target, and user input that reaches commands unchanged."""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from lightning_sv.scale.strategy import AXES

ROOT = Path(__file__).parent.parent
#: without what an outer `make test ARGS=...` hands down: variables are written in capitals
ENV = {name: value for name, value in os.environ.items() if not name.isupper() or name in ("PATH", "HOME", "TMPDIR")}
pytestmark = NEEDS_MAKE = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def make(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, env=ENV)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trian", "there is no target trian; make help lists them"),
        ("train model=tiny", "there is no variable model; known: .* MODEL "),
        ("train MODEL=tinny", r"there is no MODEL 'tinny'; known: .* mini .* tiny\."),
        ("train MODEL=t*", r"there is no MODEL 't\*'"),
        ("train 'MODEL=tiny mini'", "MODEL is 'tiny mini'"),
        ("train 'PROBES=sharpness flatness'", "there is no PROBES 'flatness'"),
        ("train 'PROBES=sharpness copying'", "PROBES is 'sharpness copying'; expected one of:"),
        ("compare DATA=mine", "there is no DATA 'mine', and no text of .*; known: .*fineweb-edu installed .*stdlib"),
        ("train DATA=lightning_sv/*.py", r"DATA is 'lightning_sv/\*.py'"),
        ("train DATA=stdlib/", "DATA is 'stdlib/'"),
        ("paper BUDGET=cheap", "there is no BUDGET 'cheap'"),
        ("generate", "give RUN, the directory of a run"),
        ("export RUN=runs/mine", "give OUT, the folder to write"),
        ("train SEEDS=3", "make train does not read SEEDS; "),
        ("data theory SEED=3", "make data theory does not read SEED; "),
    ],
)
def test_make_wrong_target_or_variable_is_refused(words: str, message: str) -> None:
    done = make(*shlex.split(words))
    assert done.returncode == 2 and re.search(message, done.stderr) and "lightning-sv" not in done.stdout


def test_make_variable_read_by_one_of_two_targets_is_accepted() -> None:
    assert make("data", "train", "SEED=3", "DATA=stdlib").returncode == 0


Run = Callable[..., list[list[str]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run make in a folder with conf/ alone, on a stand-in for `lightning-sv`; return the words of its calls."""
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    program = tmp_path / "venv/bin/lightning-sv"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\" >> calls; printf '\\001' >> calls\n")
    program.chmod(0o755)
    for name in (".run", ".hf"):
        (tmp_path / "venv" / name).touch()

    def call(*words: str) -> list[list[str]]:
        (tmp_path / "calls").write_text("")
        made = [word for name in (".run", ".hf") for word in ("-o", f"venv/{name}")]
        command = ["make", "-f", str(ROOT / "Makefile"), *made, "VENV=venv", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=ENV)
        assert done.returncode == 0, done.stderr
        calls = (tmp_path / "calls").read_text().split("\x01")
        commands = [words.split("\0")[:-1] for words in calls[:-1]]
        return [words for words in commands if words[:2] != ["fit", "--dry_run"]]  # of arguments, without a corpus

    return call


def test_make_train_checks_arguments_before_the_corpus(run: Run, tmp_path: Path) -> None:
    run("train", "SCALE=unifed", "LR=fast", "ARGS=--x y")
    check, prepare, _ = (tmp_path / "calls").read_text().split("\x01")[:3]
    assert prepare.startswith("prepare\0")
    words = check.split("\0")[:-1]
    assert words[:2] == ["fit", "--dry_run"]
    assert words[-6:] == ["--model.scale", "unifed", "--model.optim.lr", "fast", "--x", "y"]


#: texts that a shell or make would interpret
HOSTILE = """it's "$HOME" `touch a` $(touch b) $5 $$ \\ ; touch c # & | > d * ? ~ %\nü"""


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["train"], "fit ... --config conf/model/mini.yaml"),
        (["train", "SEED=3", "LR=0.1", "STD=0.2", "ARGS=--x 'a=b c'"],
         "fit ... --model.optim.lr 0.1 --model.backbone.init_std 0.2 --seed_everything 3 --x 'a=b c'"),
        (["resume", "RUN=runs/a b"],
         "fit --config 'runs/a b/config.yaml' --ckpt_path 'runs/a b/checkpoints/last.ckpt'"),
        (["generate", "RUN=runs/a", "PROMPT=--def f"], "generate runs/a '--prompt=--def f'"),
        (["report", "RUN=runs/a runs/b", "OUT=c d"], "report runs/a runs/b --out 'c d'"),
        (["report", "RUN=con?"], "report conf"),
        (["export", "RUN=runs/a", "OUT=b"], "export runs/a b"),
        (["plan", "GPUS=8", "MODEL=llama-1b"], "plan --gpus 8 ... --config conf/model/llama-1b.yaml"),
        (["compare", "SEEDS=2", "B=nop hg+dp", "LR=0.1"],
         "compare --a llama --b nop hg+dp --seeds 2 --a_args= --b_args= ... conf/model/tiny.yaml --model.optim.lr 0.1"),
        (["compare", "A_ARGS=--x y"], "compare --a llama --b unified --seeds 3 '--a_args=--x y' --b_args= ..."),
        (["sweep", "SCALE=llama hg", "LR=0.01 0.02"],
         "sweep --scale llama hg --lr 0.01 0.02 ... --config conf/model/tiny.yaml"),
        (["sweep", "SEEDS=4", "STD=1 2"], "sweep --scale unified --init_std 1 2 --seeds 4 ..."),
        (["params", "SCALE=hg+or"], "params --config conf/base.yaml --config conf/model/mini.yaml --model.scale hg+or"),
        (["paper", "FIG=iwd wsd"], "paper --budget cpu --fig iwd wsd"),
    ],
)  # fmt: skip
def test_make_target_runs_its_command(words: list[str], command: str, run: Run) -> None:
    """`...` stands for any words."""
    said = shlex.join(run(*words)[-1])
    before, dots, after = command.partition("...")
    assert said.startswith(before) and said.endswith(after) and (dots or said == command), said


@pytest.mark.parametrize(
    ("words", "given"),
    [(["generate", "RUN=r"], "PROMPT"), (["generate"], "RUN"), (["export", "RUN=r"], "OUT"), (["train"], "SEED"),
     (["train"], "LR"), (["train"], "SCALE"), (["compare"], "A_ARGS"), (["compare"], "A"), (["plan"], "GPUS")],
)  # fmt: skip
def test_make_hostile_variable_is_not_evaluated(words: list[str], given: str, run: Run, tmp_path: Path) -> None:
    (said,) = (call for call in run(*words, f"{given}={HOSTILE}") if call[0] != "prepare")
    assert any(word.endswith(HOSTILE) for word in said), said
    assert {path.name for path in tmp_path.iterdir()} == {"calls", "conf", "venv"}


def test_make_args_are_split_and_not_evaluated(run: Run, tmp_path: Path) -> None:
    (said,) = run("theory", f"ARGS=--a {shlex.quote(HOSTILE)} $(touch b) `touch a` $HOME;touch c *")
    assert said[3:] == ["--a", HOSTILE, "$(touch", "b)", "`touch", "a`", "$HOME;touch", "c", "*"]
    assert {path.name for path in tmp_path.iterdir()} == {"calls", "conf", "venv"}
    with pytest.raises(AssertionError, match="ARGS is"):
        run("theory", "ARGS=--a 'b")


@pytest.mark.parametrize(
    ("given", "text", "corpus"),
    [("./notes/", "notes", "data/notes"), ("notes/letters.txt", "notes/letters.txt", "data/letters"),
     ("my  notes", "my  notes", "data/my__notes"), ("it's, $5", "it's, $5", "data/it's,_$5")],
)  # fmt: skip
def test_make_own_text_is_prepared_and_trained_on(given: str, text: str, corpus: str, run: Run, tmp_path: Path) -> None:
    for folder in ("notes", "my  notes", "it's, $5"):
        (tmp_path / folder).mkdir()
    (tmp_path / "notes/letters.txt").write_text("text")
    made = ["--data.corpus.source", f"files:{text}", "--data.corpus.dir", corpus]
    layer = ["--config", f"{corpus}/corpus.yaml", "--data.corpus.dir", corpus]
    assert run("data", f"DATA={given}", "ARGS=--a b") == [["prepare", *made, "--a", "b"]]
    prepare, fit = run("train", f"DATA={given}", "ARGS=--a b")
    assert prepare == ["prepare", *made] and fit[-6:] == [*layer, "--a", "b"] and "conf/data/stdlib.yaml" not in fit
    (tmp_path / corpus).mkdir(parents=True)
    (tmp_path / corpus / "corpus.yaml").touch()
    prepare, fit = run("train", f"DATA={corpus}")
    assert prepare == ["prepare", *layer] and fit[-4:] == layer
    (tmp_path / corpus).rename(tmp_path / "data/letters.txt")  # the name of a corpus may have a dot
    layer = ["--config", "data/letters.txt/corpus.yaml", "--data.corpus.dir", "data/letters.txt"]
    for name in ("letters.txt", "data/letters.txt"):
        assert run("train", f"DATA={name}")[1][-4:] == layer


def test_make_clean_removes_corpora_and_keeps_other_files(run: Run, tmp_path: Path) -> None:
    corpus, own = tmp_path / "data/notes/corpus.yaml", tmp_path / "data/mine/held-out.jsonl"
    for file in (corpus, own):
        file.parent.mkdir(parents=True)
        file.touch()
    assert run("clean") == []
    assert own.exists() and not corpus.parent.exists()


def test_make_paper_prepares_the_corpora_of_its_budget(run: Run, tmp_path: Path) -> None:
    """Corpora of the Hugging Face hub are terabytes, so they are not prepared."""
    (tmp_path / "conf").unlink()
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    (tmp_path / "conf/data/mine.yaml").write_text("data: {corpus: {dir: data/mine}}\n")
    for name, layers in (("mine", "[trainer/cpu, data/mine]"), ("none", "[trainer/cpu]")):
        (tmp_path / f"conf/paper/budgets/{name}.yaml").write_text(f"layers: {layers}\n")
    prepares = {"mine": ["conf/data/mine.yaml"], "none": [], "gpu": [], "cpu": ["conf/data/stdlib.yaml"]}
    for budget, prepared in prepares.items():
        *before, paper = run("paper", f"BUDGET={budget}")
        assert paper == ["paper", "--budget", budget]
        assert before == [["prepare", "--config", layer] for layer in prepared]
    assert run("paper", "ARGS=--dry_run") == [["paper", "--budget", "cpu", "--dry_run"]]


def test_make_help_lists_configs_and_strategies() -> None:
    said = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, env=ENV).stdout
    for noun in ("model", "optim", "schedule", "trainer", "data", "probes", "paper", "paper/budgets"):
        listed = " ".join(sorted(path.stem for path in (ROOT / "conf" / noun).glob("*.yaml")))
        assert listed in said, noun
    words = {word for axis in AXES.values() for word in axis if word != "shared"}
    assert words <= set(re.findall(r"\w+", said)), "the strategies"


def test_make_tensorboard_prints_a_link_with_pinned_charts(tmp_path: Path) -> None:
    stand_in = tmp_path / "bin/tensorboard"
    stand_in.parent.mkdir()
    stand_in.write_text("#!/bin/sh\n")
    stand_in.chmod(0o755)
    (tmp_path / ".run").touch()
    words = ["-o", f"{tmp_path}/.run", "tensorboard", f"VENV={tmp_path}", "ARGS=--reload_interval 5 --port=7000"]
    done = subprocess.run(["make", *words], cwd=ROOT, capture_output=True, text=True, env=ENV, check=True)
    (link,) = map(urlsplit, re.findall(r"http\S+", done.stdout))
    pins = json.loads(parse_qs(link.query)["pinnedCards"][0])
    assert link.netloc == "127.0.0.1:7000" and [pin["tag"] for pin in pins] == [
        "val/loss", "train/loss", *(f"branch_norm/mean/{branch}_proj/effective" for branch in "qkv"),
    ]  # fmt: skip
