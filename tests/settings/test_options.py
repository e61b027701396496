"""The words of the command line, in which `-` counts as `_`; and the Trainer's keys, read from its source."""

import doctest
import inspect
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import lightning as L
import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_sv.__main__ import main
from lightning_sv.experiments.spec import budget_names, figure_names
from lightning_sv.settings import parse, plain_parser, yaml_file
from lightning_sv.settings.parse import parse_run
from lightning_sv.settings.trainer import DERIVED, TRAINER_DEFAULTS, trainer_keys
from tests.conftest import CONFIG, Refused, thinned


class AbsentLogger(CSVLogger):
    """Needs a package that is not installed."""

    def __init__(self, n: int = 1) -> None:
        raise ModuleNotFoundError("No module named 'absent'")


@pytest.mark.parametrize("module", [parse, plain_parser, yaml_file])
def test_doctests(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0


def test_parsers_both_spellings_are_one_option(capsys: pytest.CaptureFixture[str]) -> None:
    """Of plain parsers and of jsonargparse's, in a name alone, before '=', and in a dotted key."""
    said = []
    for a in ("_", "-"):
        plan = ["plan", "--gpus", "1", f"--gpu{a}memory=80", f"--trainer.max{a}steps", "3", "--json"]
        assert main([*plan, f"--scalars.every{a}n{a}steps", "2", *CONFIG]) == 0
        assert main(["params", f"--model.backbone.n{a}layer=3", f"--seed{a}everything", "1", *CONFIG, "--json"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and '"steps": 3' in said[0]
    _, data, trainer = parse_run(
        [*CONFIG, "--data.global_batch", "4", "--trainer.max-steps=-1", "--trainer.max-epochs", "7"], check_corpus=False
    )
    assert (data.global_batch, trainer["max_steps"], trainer["max_epochs"]) == (4, -1, 7)


ABSENT = f"{__name__}.AbsentLogger"
WRONG = [
    (["--model.lr", "0.1"], "Did you mean 'model.optim.lr'?"),
    (["--trainer.max_step", "3"], "Did you mean 'trainer.max_steps'?"),  # no abbreviation
    (["--model.optim.lr", "nan"], "error: model.optim.lr is nan; expected a finite number or null.\n"),
    (["--data.seq_len", "x"], "error: data.seq_len is x; expected a whole number.\n"),
    (["--allow_lr_jump", "maybe"], "error: allow_lr_jump is maybe; expected true or false.\n"),
    (["--model.compile", "all"], "error: model.compile is all; expected one of: none model block.\n"),
    (["--trainer.callbacks+=Nonsense"], "trainer.callbacks is Nonsense; expected a list or the import path of a C"),
    (["--seed_everything", ""], "error: seed_everything is ''; expected true or false or a whole number.\n"),
    (["--seed_everything", "-3"], "error: seed_everything is -3; expected an integer from 0 to 4294967295.\n"),
    *(
        ([f"--trainer.{key}", value], f"error: {ABSENT} cannot be created: No module named 'absent'.\n")
        for key, value in (
            ("logger", ABSENT),
            ("logger.class_path", ABSENT),
            ("logger", f"[{{class_path: {ABSENT}}}]"),
            ("logger+", ABSENT),
        )
    ),
    (["--trainer.logger", ABSENT, "--trainer.logger.n", "x"], "error: trainer.logger: n is x; expected a whole number"),
    (["--trainer.callbacks", "no_module.C"], "trainer.callbacks: no_module.C cannot be created: No module named 'no"),
]


@pytest.mark.parametrize(("words", "message"), thinned(WRONG, WRONG[::2], several=True))
def test_fit_value_that_fits_nothing_is_answered_in_a_sentence(
    words: list[str], message: str, refused: Refused
) -> None:
    said = refused("fit", *CONFIG, *words)
    assert message in said and said.count("\n") == 1 and "Union" not in said


@pytest.mark.parametrize("command", [["fit"], ["plan", "--gpus", "1"], ["compare", "--a", "llama", "--b", "nop"]])
def test_run_without_files_is_told_which(command: list[str], refused: Refused) -> None:
    said = refused(*command)
    assert "data.seq_len" in said and "--config tiny-unified" in said and "fit.model" not in said


def test_theory_path_that_cannot_be_used_is_named(tmp_path: Path, refused: Refused) -> None:
    """Wrong input gives exit code 2: a file instead of a folder, also for users who can write everywhere."""
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file/in"):
        assert str(tmp_path / "file") in refused("theory", "--out", str(out))


def test_paper_help_says_defaults_figures_and_budgets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        main(["paper", "--help"])
    said = capsys.readouterr().out
    for words in ("runs/paper/BUDGET by default", "(default: cpu)", " ".join(figure_names()), " ".join(budget_names())):
        assert words in said, words


def test_trainer_keys_equal_the_signature() -> None:
    signature = inspect.signature(L.Trainer).parameters
    keys = {field.name: field for field in fields(trainer_keys())}
    assert {name: key.default for name, key in keys.items()} == {name: p.default for name, p in signature.items()}
    for name in ("max_steps", "devices", "precision", "max_time", "val_check_interval", "deterministic"):
        assert keys[name].type == signature[name].annotation, name
    assert {*DERIVED, *TRAINER_DEFAULTS} <= set(signature)
