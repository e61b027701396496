"""Ranks that differ in settings, data or software are refused before the first step, on every
rank."""

import shlex
from pathlib import Path

import pytest

from tests.conftest import argv
from tests.launch import launch
from tests.lit.several_processes import CPU, STRATEGIES

FSDP = f"--config {STRATEGIES['fsdp']} {shlex.join(CPU)} --trainer.devices 2"


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
    fit += argv(f"--trainer.devices 2 --trainer.max_steps 4 --run_dir {tmp_path / 'run'}")
    ended = launch("tests.lit.ranks", "one_rank_differs", str(len(own)), *own, *fit, logs=tmp_path)
    for log in ended.logs:
        assert f"error: {key} is " in log or f"error: {key}." in log, ended
        assert "on rank 1; expected " in log and "Traceback" not in log, ended
    assert not (tmp_path / "run" / "config.yaml").exists()
