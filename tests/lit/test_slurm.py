"""Under SLURM: what Lightning would do there by itself."""

from pathlib import Path

import pytest

from lightning_sv.__main__ import main
from tests.faults.test_signals import SRUN


def test_fewer_processes_than_devices_are_refused(
    short_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In an allocation, without srun."""
    for name in ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"):
        monkeypatch.setenv(name, SRUN[name])
    two = ["--trainer.strategy", "ddp", "--trainer.devices", "2"]
    assert main(["fit", *short_args, *two, "--run_dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in ("trainer.devices", "2 x 1", "srun", "torchrun"))
    assert not (tmp_path / "run").exists()
