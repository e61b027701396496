"""The arguments of `lightning-sv compare`, on a real corpus with the stand-in for training."""

import json
from functools import partial
from pathlib import Path

import pytest

from lightning_sv.paper import command
from lightning_sv.paper.compare import compare
from tests.paper.test_compare import FAKE


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`compare` with the stand-in, in an empty folder."""
    monkeypatch.setattr(command, "compare", partial(compare, launcher=FAKE))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("fake")
def test_several_arms_with_arguments_and_names(run_args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`--b_args` reach every B and not A; labels are the strategy and what it changes, or as given."""
    words = ["--a", "llama", "--b", "hg+dp+or", "nop", "--seeds", "1", *run_args, "--json"]
    assert command.run_compare([*words, "--b_args=--model.optim.lr 0.1"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert [arm["label"] for arm in made["arms"]] == ["llama", "hg+dp+or,lr=0.1", "nop,lr=0.1"]
    assert [arm["args"] for arm in made["arms"]] == [[], ["--model.optim.lr", "0.1"], ["--model.optim.lr", "0.1"]]
    assert [run["name"] for run in made["runs"]] == ["a-seed0", "b-seed0", "c-seed0"]
    assert Path("runs/compare/llama_vs_hg+dp+or-lr=0.1_nop-lr=0.1/comparison.png").is_file()
    assert command.run_compare([*words, "--a_label", "base", "--b_label", "all", "none"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert [arm["label"] for arm in made["arms"]] == ["base", "all", "none"]
    with pytest.raises(ValueError, match="--b names 2 strategies and --b_label 1; give one"):
        command.run_compare([*words, "--b_label", "all"])


@pytest.mark.usefixtures("fake")
def test_any_two_arms_of_one_model_are_refused(run_args: list[str]) -> None:
    """By their meaning in this model, the baseline among them or not; nothing is run."""
    for a, others, pair in (
        ("llama", ["nop", "bp+iwd"], r"'llama' and 'bp\+iwd'"),
        ("llama", ["hg", "nop", "nop+iwd"], r"'nop' and 'nop\+iwd'"),
    ):
        with pytest.raises(ValueError, match=f"strategies {pair} are the same model"):
            command.run_compare(["--a", a, "--b", *others, *run_args])
    assert not Path("runs").exists()
