"""The words of the command line: `-` counts as `_` in every option's name, and nowhere else."""

import doctest
import inspect
import json

import pytest
import yaml

from lightning_sv.__main__ import main
from lightning_sv.cli import params
from lightning_sv.settings import plain_parser
from lightning_sv.settings.model import Pretraining
from lightning_sv.settings.parse import parse_run
from tests.test_imports import CONFIG


def test_names_alone_are_spelt_anew() -> None:
    assert doctest.testmod(plain_parser).failed == 0


def test_both_spellings_are_one_option(capsys: pytest.CaptureFixture[str]) -> None:
    """Of plain parsers and of jsonargparse's, in a name alone, before '=', and in a dotted key."""
    said = []
    for a, b in (("_", "_"), ("-", "-"), ("_", "-")):
        plan = ["plan", "--gpus", "1", f"--gpu{a}memory=80", f"--trainer.max{b}steps", "3", "--json"]
        assert main([*plan, f"--scalars.every{a}n{b}steps", "2", *CONFIG]) == 0
        assert main(["params", f"--model.backbone.n{a}layer=3", f"--seed{b}everything", "1", *CONFIG, "--json"]) == 0
        said.append(capsys.readouterr().out)
        _, data, trainer = parse_run(
            [*CONFIG, f"--data.global{a}batch", "4", f"--trainer.max{b}steps=-1"], check_corpus=False
        )
        assert data.global_batch == 4 and trainer["max_steps"] == -1
    assert said[0] == said[1] == said[2] and '"steps": 3' in said[0]


def test_fit_takes_both_spellings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", *CONFIG, "--trainer.max-steps", "7", "--batch-hash.every-n-steps=5", "--print-config"])
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["trainer"]["max_steps"] == 7 and config["batch_hash"]["every_n_steps"] == 5


def test_values_keep_their_hyphens(capsys: pytest.CaptureFixture[str]) -> None:
    named = ["--model.backbone.name", "my-model", "--model.optim.lr", "1e-1"]
    assert main(["plan", "--gpus", "1", *CONFIG, *named, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "my-model"


def test_a_misspelt_option_is_answered_with_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["params", *CONFIG, "--model.backbone.n-lyaer", "3"]) == 2
    assert "Did you mean 'model.backbone.n_layer'?" in capsys.readouterr().err


def test_params_reads_past_every_key_of_a_model_that_does_not_count() -> None:
    counts = {"backbone", "scale", "scale_options", "optim", "schedule"}
    assert set(inspect.signature(Pretraining).parameters) == counts | set(params.TRAINING_KEYS)
