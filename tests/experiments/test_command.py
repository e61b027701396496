"""Arguments of `lightning-sv compare`, on a real corpus with fake training."""

import json
import math
from functools import partial
from pathlib import Path

import pytest

from lightning_sv.cli import compare as command
from lightning_sv.experiments.results import Figure
from lightning_sv.settings.parse import parse_run
from tests.conftest import thinned
from tests.experiments.test_compare import FAKE


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use fake training in an empty folder, and write no report."""
    monkeypatch.setattr(command, "run", partial(command.run, launcher=FAKE))
    monkeypatch.setattr("lightning_sv.experiments.compare.write_report", lambda *given, **named: None)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("fake")
def test_compare_command_arms_have_their_arguments(run_args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`--b_args` are passed to each B and not to A; labels are strategy and arguments, or those of `--b_label`."""
    words = ["--a", "llama", "--b", "hg+dp+or", "nop", "--seeds", "1", *run_args, "--json"]
    assert command.run([*words, "--b_args=--model.optim.lr 0.1"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert [arm["label"] for arm in made["arms"]] == ["llama", "hg+dp+or,lr=0.1", "nop,lr=0.1"]
    assert [arm["args"] for arm in made["arms"]] == [[], ["--model.optim.lr", "0.1"], ["--model.optim.lr", "0.1"]]
    assert [run["name"] for run in made["runs"]] == ["a-seed0", "b-seed0", "c-seed0"]
    out = Path("runs/compare/tiny-shards")
    assert Path(out, "llama_vs_hg+dp+or-lr=0.1_nop-lr=0.1/comparison.json").is_file()
    assert command.run([*words, "--a_label", "base", "--b_label", "all", "none"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert [arm["label"] for arm in made["arms"]] == ["base", "all", "none"]
    with pytest.raises(ValueError, match="--b"):
        command.run([*words, "--b_label", "all"])


BUDGET = ["--trainer.max_steps", "-1", "--model.tokens_per_param", "1"]


def steps_handed_down(args: list[str], monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Return trainer.max_steps in the overrides of each arm that `compare` gets."""
    taken: list[Figure] = []
    monkeypatch.setattr(command, "compare", lambda figure, *_, **__: taken.append(figure))
    monkeypatch.setattr(command, "print_comparison", lambda *_: None)
    assert command.run(["--a", "llama", "--b", "unified", "nop", *args]) == 0
    return [arm.overrides.get("trainer.max_steps") for arm in taken[0].spec.panels[0].arms.values()]


def test_compare_command_all_arms_have_the_tokens_of_a(
    run_args: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameters of A define the tokens of each arm, which are printed."""
    sizes = {s: parse_run([*run_args, "--model.scale", s])[0].n_activated for s in ("llama", "unified")}
    steps = math.ceil(sizes["llama"] / 128)
    assert math.ceil(sizes["unified"] / 128) > steps  # its own tokens would be different
    assert steps_handed_down([*run_args, *BUDGET], monkeypatch) == [steps] * 3
    said = capsys.readouterr().err
    assert f"every arm trains for {128 * steps:,} tokens, 1 per parameter of llama: {steps} steps of 128." in said
    # given steps are only changed for arms with a different batch
    assert steps_handed_down(run_args, monkeypatch) == [None] * 3
    assert steps_handed_down([*run_args, "--b_args=--data.global_batch 8"], monkeypatch) == [None, 6, 6]
    assert "12 steps of 128; 6 steps of unified,global_batch=8; 6 steps of nop" in capsys.readouterr().err
    equal = ["--a_args=--trainer.max_steps 6", "--b_args=--data.global_batch 8 --trainer.max_steps 3"]
    assert steps_handed_down([*run_args, *equal], monkeypatch) == [6, 3, 3]


WRONG = [
    (["--trainer.max_steps", "9", "--b_args=--data.global_batch 8"], "trainer.max_steps"),
    (["--b_args=--trainer.max_steps 3"], "trainer.max_steps"),
    (["--b_args=--model.tokens_per_param 1"], "model.tokens_per_param"),
    (["--b_args=--data.val_sequences 8"], "data.val_sequences"),
    (["--b_args=--data.seq_len 16"], "data.seq_len"),
    (["--b_args=--data.corpus.dir {short}"], "corpus_hash"),
    (["--b_args=--data.micro_batch 3"], "data.micro_batch"),
    (["--trainer.val_check_interval", "0.5"], "data.validations instead"),
]


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("args", "message"),
    thinned(WRONG, WRONG[::2], several=True),
)
def test_compare_command_wrong_arguments_refused_before_training(
    args: list[str], message: str, run_args: list[str], short_corpus: Path
) -> None:
    args = [word.format(short=short_corpus) for word in args]
    with pytest.raises(ValueError, match=message):
        command.run(["--a", "llama", "--b", "unified", *run_args, *args])
    assert not Path("runs").exists()
