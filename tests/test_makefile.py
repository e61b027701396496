"""The Makefile's variables: what is misspelt is named before anything runs, and `make help` lists what there is."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lightning_sv.runs.job import program
from lightning_sv.scale.strategy import AXES

ROOT = Path(__file__).parent.parent
#: without what an outer `make test ARGS=...` hands down
ENV = {
    name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "ARGS")
}
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def make(*words: str) -> subprocess.CompletedProcess[str]:
    """What make says it would run."""
    return subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, env=ENV)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "model=tiny"], r"there is no variable model; known: .* MODEL "),
        (["train", "ARGS=--a b=c", "SEEd=1"], "there is no variable SEEd"),
        (["train", "MODEL=tinny"], r"there is no MODEL 'tinny'; known: .* mini .* tiny\."),
        (
            ["compare", "DATA=mine"],
            r"there is no DATA 'mine', and no text of .*; known: fineweb-edu installed .*stdlib",
        ),
        (["train", "PROBES=sharpness flatness"], "there is no PROBES 'flatness'"),
        (["generate"], "give RUN, the directory of a run"),
        (["export", "RUN=runs/mine"], "give OUT, the folder to write"),
    ],
)
def test_what_is_misspelt_or_left_out_stops_make(words: list[str], message: str) -> None:
    done = make(*words)
    assert done.returncode == 2 and re.search(message, done.stderr) and "lightning-sv" not in done.stdout


def test_an_unknown_target_is_answered_with_where_they_are_listed() -> None:
    done = subprocess.run(["make", "trian"], cwd=ROOT, capture_output=True, text=True, env=ENV)
    assert done.returncode == 2 and "there is no target trian; make help lists them" in done.stderr


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["train", "SEED=3", "ARGS=--x 'a=b c'"], "fit .* --seed_everything '3' --x 'a=b c'"),
        (["train"], r"fit .* --config conf/model/mini.yaml *$"),
        (["resume", "RUN=runs/a"], "fit --config 'runs/a/config.yaml' --ckpt_path 'runs/a/checkpoints/last.ckpt'"),
        (["generate", "RUN=runs/a", "PROMPT=def f"], "generate 'runs/a' --prompt 'def f'"),
        (["report", "RUN=runs/a runs/b", "OUT=c"], "report runs/a runs/b --out 'c'"),
        (["export", "RUN=runs/a", "OUT=b"], "export 'runs/a' 'b'"),
        (["plan", "GPUS=8", "MODEL=llama-1b"], "plan --gpus 8 .* --config conf/model/llama-1b.yaml"),
        (
            ["sweep", "SCALE=llama hg", "LR=0.01 0.02"],
            r"sweep --scale llama hg --lr 0\.01 0\.02 .*--config conf/model/tiny.yaml *$",
        ),
        (["params", "SCALE=hg+or"], r"params --config conf/model/mini.yaml --model.scale 'hg\+or'"),
    ],
)
def test_targets_are_the_commands(words: list[str], command: str) -> None:
    done = make(*words)
    assert done.returncode == 0 and re.search(f"lightning-sv {command}", done.stdout, re.MULTILINE), done.stdout


def test_data_is_a_name_or_ones_own_text(tmp_path: Path) -> None:
    """A folder or a file is prepared under its name, and trained on by that name or again by its path."""
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/letters.txt").write_text("text")

    def said(*words: str) -> str:
        command = ["make", "-n", "-f", str(ROOT / "Makefile"), "-o", f"{tmp_path}/.run", f"VENV={tmp_path}", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, env=ENV).stdout

    (tmp_path / ".run").touch()
    made = "prepare --data.corpus.source 'files:{}' --data.corpus.dir '{}'"
    trained = "model/mini.yaml --config '{}/corpus.yaml'"
    for given, text, corpus in (
        ("./notes/", "notes", "data/notes"),
        ("notes/letters.txt", "notes/letters.txt", "data/letters"),
    ):
        assert f"{made.format(text, corpus)} --a b" in said("data", f"DATA={given}", "ARGS=--a b").replace("  ", " ")
        out = said("train", f"DATA={given}", "ARGS=--a b").replace("  ", " ")
        assert made.format(text, corpus) in out and trained.format(corpus) in out and "data/stdlib" not in out
        assert out.count("--a b") == 1
    (tmp_path / "data/letters").mkdir(parents=True)
    (tmp_path / "data/letters/corpus.yaml").touch()
    for given in ("letters", "data/letters"):
        out = said("train", f"DATA={given}").replace("  ", " ")
        assert "prepare --config 'data/letters/corpus.yaml' \n" in out and trained.format("data/letters") in out


def test_a_budget_prepares_the_corpus_that_it_names(tmp_path: Path) -> None:
    """The embedded one alone; any other is prepared by name, beforehand."""
    budgets = tmp_path / "conf/paper/budgets"
    budgets.mkdir(parents=True)
    for folder in (path for path in (ROOT / "conf").iterdir() if path.name != "paper"):
        (tmp_path / "conf" / folder.name).symlink_to(folder)
    for name, layer in (("with", "data/stdlib"), ("without", "data/fineweb-edu")):
        (budgets / f"{name}.yaml").write_text(f"layers: [trainer/cpu, {layer}]\n")
    (tmp_path / ".run").touch()
    for budget, prepared in (("with", True), ("without", False), ("absent", False)):
        words = ["make", "-n", "-f", str(ROOT / "Makefile"), "-o", f"{tmp_path}/.run", f"VENV={tmp_path}"]
        words += ["paper", f"BUDGET={budget}"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True, env=ENV)
        assert ("lightning-sv prepare" in done.stdout) == prepared and f"paper --budget '{budget}'" in done.stdout


def test_a_run_tells_to_type_what_the_shell_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """make starts .venv/bin/lightning-sv, which is on no PATH; an activated environment's is."""
    own = tmp_path / "bin/lightning-sv"
    own.parent.mkdir()
    own.touch(mode=0o755)
    monkeypatch.setattr("sys.argv", [str(own), "fit"])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program() == str(own)
    monkeypatch.setenv("PATH", str(own.parent))
    assert program() == "lightning-sv"
    monkeypatch.setattr("sys.argv", ["lightning_sv/__main__.py", "fit"])
    assert program() == "lightning-sv"


def test_a_taken_port_is_answered_with_how_to_choose_another(tmp_path: Path) -> None:
    """TensorBoard's exit code for it, from a stand-in; the link is that of the port that is asked for."""
    (tmp_path / "bin").mkdir()
    (tmp_path / ".run").touch()
    stand_in = tmp_path / "bin/tensorboard"
    stand_in.write_text("#!/bin/sh\necho $@\nexit $CODE\n")
    stand_in.chmod(0o755)
    for code, hint in (("255", True), ("1", False)):
        words = ["make", "-o", f"{tmp_path}/.run", "tensorboard", f"VENV={tmp_path}", "ARGS=--port 7000"]
        env = {**os.environ, "CODE": code}
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=env)
        assert "http://127.0.0.1:7000/" in done.stdout and "--port 7000" in done.stdout
        assert ('make tensorboard ARGS="--port 6016"' in done.stderr) == hint and done.returncode == 2


def test_help_lists_what_there_is() -> None:
    said = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, env=ENV).stdout
    for noun in ("model", "optim", "schedule", "trainer", "data", "probes", "paper", "paper/budgets"):
        listed = " ".join(sorted(path.stem for path in (ROOT / "conf" / noun).glob("*.yaml")))
        assert listed in said, noun
    words = {word for axis in AXES.values() for word in axis if word != "shared"}
    assert words <= set(re.findall(r"\w+", said)), "the strategies"
