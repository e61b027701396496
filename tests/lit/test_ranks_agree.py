"""Ranks that differ in settings, data or software are refused before the first step, on every
rank."""

import shlex
from pathlib import Path

import pytest

from tests.conftest import argv
from tests.launch import launch
from tests.lit.several_processes import CPU, STRATEGIES

FSDP = shlex.join(["--config", str(STRATEGIES["fsdp"]), *CPU, "--trainer.devices", "2"])


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("model.optim.lr", "--model.optim.lr 0.5"),
        ("model.optim.weight_decay", "--model.optim.weight_decay 0.5"),
        ("seed_everything", "--seed_everything 7"),
        ("data.seed", "--data.seed 7"),
        ("data.global_batch", "--data.global_batch 64"),
        ("trainer.max_steps", "--trainer.max_steps 9"),
        ("trainer.strategy", FSDP),
        ("checkpoint.every_n_steps", "--checkpoint.every_n_steps 1"),
        ("the hash of the corpus", "--data.corpus.dir CORPUS"),
        ("the commit of lightning_sv", "COMMIT"),
    ],
)
def test_fit_different_rank_is_refused(
    key: str, words: str, short_args: list[str], corpus: Path, tmp_path: Path
) -> None:
    own = argv(words.replace("CORPUS", str(corpus)))
    fit = [
        "--config",
        str(STRATEGIES["ddp"]),
        *CPU,
        *short_args,
        *argv("--trainer.devices 2 --trainer.max_steps 4"),
    ]
    fit += ["--run_dir", str(tmp_path / "run")]
    ended = launch("tests.lit.ranks", "one_rank_differs", str(len(own)), *own, *fit, logs=tmp_path)
    for log in ended.logs:
        assert f"error: {key} is " in log or f"error: {key}." in log, ended
        assert "on rank 1; expected " in log and "Traceback" not in log, ended
    assert not (tmp_path / "run" / "config.yaml").exists()
