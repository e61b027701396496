"""Checks under SLURM that override Lightning's defaults."""

from pathlib import Path

import pytest

from lightning_sv.__main__ import main
from lightning_sv.runs.events import read_run
from tests.conftest import Refused
from tests.faults.test_signals import SRUN
from tests.lit.runs import LAST


def test_a_checkpoint_in_the_working_directory_is_not_resumed(
    short_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning resumes any hpc_ckpt_*.ckpt there under SLURM."""
    args = [*short_args, "--trainer.max_steps", "2", "--scalars.every_n_steps", "1"]
    assert main(["fit", *args, "--run_dir", str(tmp_path / "other")]) == 0
    (tmp_path / "other" / LAST).rename(tmp_path / "hpc_ckpt_1.ckpt")
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    assert main(["fit", *args, "--run_dir", "run"]) == 0
    assert read_run(tmp_path / "run").curve("train/loss").tokens[0] == 32 * 32  # of the first step


def test_fewer_processes_than_devices_are_refused(
    short_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """In an allocation, without srun."""
    for name in ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"):
        monkeypatch.setenv(name, SRUN[name])
    two = ["--trainer.strategy", "ddp", "--trainer.devices", "2"]
    error = refused("fit", *short_args, *two, "--run_dir", str(tmp_path / "run"))
    assert all(word in error for word in ("trainer.devices", "2 x 1", "srun", "torchrun"))
    assert not (tmp_path / "run").exists()


def test_tasks_without_a_number_per_node_are_refused(
    short_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """Lightning needs --ntasks-per-node."""
    for name, value in (SRUN | {"SLURM_NTASKS": "2"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE", raising=False)
    assert "--ntasks-per-node=2" in refused("fit", *short_args, "--run_dir", str(tmp_path / "run"))
