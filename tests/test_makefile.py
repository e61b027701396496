"""The Makefile: each target is one command, unknown variables are refused, `make clean` keeps other
files."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT

#: without what an outer `make test ARGS=...` hands down: variables are written in capitals
ENV = {
    name: value
    for name, value in os.environ.items()
    if not name.isupper() or name in ("PATH", "HOME", "TMPDIR")
}
pytestmark = NEEDS_MAKE = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def make(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", "-n", *words], cwd=cwd, capture_output=True, text=True, env=ENV)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train model=tiny", "there is no variable model; known: .* MODEL "),
        ("generate", "give RUN, the directory of a run"),
        ("export RUN=runs/mine", "give OUT, the folder to write"),
    ],
)
def test_make_wrong_variable_is_refused(words: str, message: str) -> None:
    done = make(*shlex.split(words))
    assert (
        done.returncode == 2
        and re.search(message, done.stderr)
        and "lightning-sv" not in done.stdout
    )


NAMES = "--optim adamw --schedule cos --trainer cpu --data stdlib"


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["data", "DATA=my notes"], "prepare --data 'my notes'"),
        (["train"], f"fit --model mini {NAMES}"),
        (
            ["train", "SCALE=hg", "SEED=3", "LR=0.1", "PROBES=copying", "ARGS=--x 'a b'"],
            f"fit --model mini {NAMES} --probes copying --scale hg"
            " --model.optim.lr 0.1 --seed_everything 3 --x 'a b'",
        ),
        (
            ["resume", "RUN=runs/a b"],
            "fit --config 'runs/a b/config.yaml' --ckpt_path 'runs/a b/checkpoints/last.ckpt'",
        ),
        (["report", "RUN=runs/a runs/b", "OUT=c d"], "report runs/a runs/b --out 'c d'"),
        (["export", "RUN=runs/a", "OUT=b"], "export runs/a b"),
        (
            ["plan", "GPUS=8", "MODEL=llama-1b"],
            f"plan --gpus 8 --model llama-1b {NAMES.replace('cpu', 'ddp')}",
        ),
        (["params", "SCALE=hg+or"], "params --model mini --scale hg+or"),
        (
            ["compare", "B=nop hg+dp", "A_ARGS=--x y"],
            "compare --baseline llama --arms nop hg+dp --seeds 3"
            f" '--a_args=--x y' --b_args= --model tiny {NAMES}",
        ),
        (
            ["sweep", "SCALE=llama hg", "LR=0.01 0.02"],
            f"sweep --scale llama hg --lr 0.01 0.02 --model tiny {NAMES}",
        ),
        (["paper", "FIG=iwd wsd"], "paper --budget cpu --fig iwd wsd"),
    ],
)
def test_make_target_is_one_command(words: list[str], command: str) -> None:
    (line,) = (line for line in make(*words).stdout.splitlines() if "lightning-sv" in line)
    assert shlex.join(shlex.split(line)[1:]) == command


def test_make_clean_removes_corpora_and_keeps_other_files(tmp_path: Path) -> None:
    corpus = tmp_path / "data/notes/corpus.yaml"
    own = tmp_path / "data/mine/held-out.jsonl"
    for file in (corpus, own):
        file.parent.mkdir(parents=True)
        file.touch()
    subprocess.run(
        ["make", "-f", str(ROOT / "Makefile"), "clean"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    assert own.exists() and not corpus.parent.exists()
