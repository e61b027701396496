"""Where a run reads and writes: spellings of its path, other folders, and defaults of Lightning under SLURM."""

from pathlib import Path

import pytest

from lightning_sv.__main__ import main
from lightning_sv.runs.directory import CONFIG, LAST, SUMMARY, event_files, read_config
from lightning_sv.runs.events import read_run
from tests.conftest import Refused
from tests.faults.test_signals import SRUN


def test_fit_expanded_run_dir_finds_its_corpus_from_elsewhere(
    run_args: list[str], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    (home / "$kept").mkdir()
    (home / "text").symlink_to(corpus)
    monkeypatch.chdir(home)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NAME", "$kept/~")
    args = [*run_args, "--data.corpus.dir", "text", "--data.validations", "1", "--trainer.max_steps"]
    assert main(["fit", *args, "1", "--run_dir", "~/$NAME"]) == 0
    run = home / "$kept" / "~"
    assert event_files(run) and (run / CONFIG).is_file() and (run / SUMMARY).is_file() and (run / LAST).is_file()
    assert sorted(path.name for path in home.iterdir()) == ["$kept", "text"]
    assert list((home / "$kept").iterdir()) == [run]
    assert read_config(run)["data"]["corpus"]["dir"] == str(home / "text")
    monkeypatch.chdir(elsewhere)
    again = ["--config", "~/$NAME/config.yaml", "--ckpt_path", "~/$NAME/checkpoints/last.ckpt"]
    assert main(["validate", *again]) == 0
    assert not list(elsewhere.iterdir())


def test_fit_slurm_checkpoint_in_the_working_directory_is_ignored(
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


def test_fit_fewer_processes_than_devices_is_refused(
    short_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """In an allocation, without srun."""
    for name in ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"):
        monkeypatch.setenv(name, SRUN[name])
    two = ["--trainer.strategy", "ddp", "--trainer.devices", "2"]
    error = refused("fit", *short_args, *two, "--run_dir", str(tmp_path / "run"))
    assert all(word in error for word in ("trainer.devices", "2 x 1", "srun", "torchrun"))
    assert not (tmp_path / "run").exists()


def test_fit_tasks_without_a_number_per_node_is_refused(
    short_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """Lightning needs --ntasks-per-node."""
    for name, value in (SRUN | {"SLURM_NTASKS": "2"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE", raising=False)
    assert "--ntasks-per-node=2" in refused("fit", *short_args, "--run_dir", str(tmp_path / "run"))
