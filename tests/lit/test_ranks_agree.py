"""Ranks that differ in settings, data or software are refused before the first step, on every
rank."""

import shlex
from copy import deepcopy
from functools import reduce
from pathlib import Path

import pytest

from lightning_sv.errors import ConfigError
from lightning_sv.lit.run_arguments import run_parser
from lightning_sv.lit.same_run import _check_same
from tests.conftest import argv
from tests.launch import launch
from tests.lit.several_processes import CPU, STRATEGIES

FSDP = shlex.join(["--config", str(STRATEGIES["fsdp"]), *CPU, "--trainer.devices", "2"])


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("model.optim.lr", "--model.optim.lr 0.5"),
        ("trainer.strategy", FSDP),
        ("the commit of lightning_sv", "COMMIT"),
    ],
)
def test_fit_different_rank_is_refused(
    key: str, words: str, short_args: list[str], tmp_path: Path
) -> None:
    own = argv(words)
    fit = ["--config", str(STRATEGIES["ddp"]), *CPU, *short_args]
    fit += [*argv("--trainer.devices 2 --trainer.max_steps 4 --run_dir"), str(tmp_path / "run")]
    ended = launch("tests.lit.ranks", "one_rank_differs", str(len(own)), *own, *fit, logs=tmp_path)
    for log in ended.logs:
        assert f"error: {key} is " in log or f"error: {key}." in log, ended
        assert "on rank 1; expected " in log and "Traceback" not in log, ended
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.optim.weight_decay", 0.5),
        ("seed_everything", 7),
        ("data.seed", 7),
        ("data.global_batch", 64),
        ("trainer.max_steps", 9),
        ("the hash of the corpus", "c0ffee"),
    ],
)
def test_check_same_names_the_key_and_both_values(
    key: str, value: object, short_args: list[str]
) -> None:
    first = run_parser().parse_args(short_args).as_dict() | {"the hash of the corpus": "a"}
    other = deepcopy(first)
    *sections, name = key.split(".")
    section = reduce(dict.__getitem__, sections, other)
    before = section.get(name)
    section[name] = value
    _check_same(first, deepcopy(first), rank=1)
    with pytest.raises(ConfigError, match=rf"^{key} is {value} on rank 1; expected {before}, "):
        _check_same(first, other, rank=1)
