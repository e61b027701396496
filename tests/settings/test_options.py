"""The words of the command line: `-` counts as `_` in every option's name, and nowhere else."""

import doctest
from pathlib import Path
from types import ModuleType

import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger

from lightning_sv.__main__ import main
from lightning_sv.experiments.spec import budget_names, figure_names
from lightning_sv.settings import parser, plain_parser
from lightning_sv.settings.parse import _parser, parse_run
from tests.conftest import thinned
from tests.test_imports import CONFIG


class AbsentLogger(CSVLogger):
    """Needs a package that is not installed."""

    def __init__(self) -> None:
        raise ModuleNotFoundError("No module named 'absent'")


class AbsentCallback(Callback):
    """Needs a package that is not installed."""

    def __init__(self, n: int = 1) -> None:
        raise ModuleNotFoundError("No module named 'absent'")


@pytest.mark.parametrize("module", [parser, plain_parser])
def test_doctests(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0


def test_both_spellings_are_one_option(capsys: pytest.CaptureFixture[str]) -> None:
    """Of plain parsers and of jsonargparse's, in a name alone, before '=', and in a dotted key."""
    said = []
    for a, b in (("_", "_"), ("-", "-")):
        plan = ["plan", "--gpus", "1", f"--gpu{a}memory=80", f"--trainer.max{b}steps", "3", "--json"]
        assert main([*plan, f"--scalars.every{a}n{b}steps", "2", *CONFIG]) == 0
        assert main(["params", f"--model.backbone.n{a}layer=3", f"--seed{b}everything", "1", *CONFIG, "--json"]) == 0
        said.append(capsys.readouterr().out)
        _, data, trainer = parse_run(
            [*CONFIG, f"--data.global{a}batch", "4", f"--trainer.max{b}steps=-1"], check_corpus=False
        )
        assert data.global_batch == 4 and trainer["max_steps"] == -1
    assert said[0] == said[1] and '"steps": 3' in said[0]
    _, _, mixed = parse_run([*CONFIG, "--data.global_batch", "4", "--trainer.max-steps=7"], check_corpus=False)
    assert mixed["max_steps"] == 7


WRONG = [
    (["--model.optim.learning_rate", "1"], "Did you mean 'model.optim.lr'?"),
    (["--model.lr", "0.1"], "Did you mean 'model.optim.lr'?"),
    (["--data.batch_size=3"], "Did you mean 'data.global_batch'?"),
    (["--trainer.max_step", "3"], "Did you mean 'trainer.max_steps'?"),  # no abbreviation
    (["--model.optim.lr", "nan"], "error: model.optim.lr is nan; expected a finite number or null.\n"),
    (["--data.seq_len", "x"], "error: data.seq_len is x; expected a whole number.\n"),
    (["--allow_lr_jump", "maybe"], "error: allow_lr_jump is maybe; expected true or false.\n"),
    (["--model.compile", "all"], "error: model.compile is all; expected one of: none model block.\n"),
    (["--trainer.callbacks+=Nonsense"], "trainer.callbacks is Nonsense; expected a list or the import path of a C"),
    (["--seed_everything", ""], "error: seed_everything is ''; expected true or false or a whole number.\n"),
    *(
        (
            ["--seed_everything", seed],
            f"error: seed_everything is {seed}; expected an integer from 0 to 4294967295.\n",
        )
        for seed in ("-3", "4294967296")
    ),
    *(
        ([f"--trainer.{key}", value], f"error: {__name__}.{name} cannot be created: No module named 'absent'.\n")
        for key, value, name in (
            ("logger", f"{__name__}.AbsentLogger", "AbsentLogger"),
            ("logger.class_path", f"{__name__}.AbsentLogger", "AbsentLogger"),
            ("logger", f"[{{class_path: {__name__}.AbsentLogger}}]", "AbsentLogger"),
            ("callbacks", f"{__name__}.AbsentCallback", "AbsentCallback"),
            ("callbacks+", f"{__name__}.AbsentCallback", "AbsentCallback"),
        )
    ),
    (
        ["--trainer.callbacks", f"{__name__}.AbsentCallback", "--trainer.callbacks.n", "x"],
        "error: trainer.callbacks: n is x; expected a whole number.\n",
    ),
    (
        ["--trainer.callbacks", "no_module.C"],
        "trainer.callbacks: no_module.C cannot be created: No module named 'no",
    ),
]


@pytest.mark.parametrize(
    ("words", "message"),
    thinned(WRONG, WRONG[::2], several=True),
)
def test_a_value_that_fits_nothing_is_answered_in_a_sentence(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *CONFIG, *words]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and "Union" not in said


def test_names_used_elsewhere_lead_to_keys_that_are_there() -> None:
    known = parser._keys(_parser())
    assert set(parser.ELSEWHERE.values()) <= known and not parser.ELSEWHERE.keys() & known - {"seed"}


@pytest.mark.parametrize("command", [["fit"], ["plan", "--gpus", "1"], ["compare", "--a", "llama", "--b", "nop"]])
def test_a_run_without_files_is_told_which(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "data.seq_len" in said and "--config tiny-unified" in said and "fit.model" not in said


def test_a_path_that_cannot_be_used_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong input gives exit code 2: a file instead of a folder, also for users who can write everywhere."""
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file/in"):
        assert main(["theory", "--out", str(out)]) == 2
        assert str(tmp_path / "file") in capsys.readouterr().err


def test_help_says_defaults_figures_and_budgets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        main(["paper", "--help"])
    said = capsys.readouterr().out
    for words in ("runs/paper/BUDGET by default", "(default: cpu)", " ".join(figure_names()), " ".join(budget_names())):
        assert words in said, words
