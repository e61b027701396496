"""Damaged sharded checkpoints are refused by every command that reads a checkpoint."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_sv.atomic import file_sha256
from lightning_sv.errors import ConfigError
from lightning_sv.lit.checkpoint import sharded_write
from lightning_sv.runs.checkpoint import check_checkpoint, load_backbone
from lightning_sv.runs.directory import LAST
from tests.conftest import Refused, argv, write_run_args
from tests.launch import launch
from tests.lit.runs import commands_that_read, flip
from tests.lit.several_processes import CPU, SHARDED, STRATEGIES


@pytest.fixture(scope="module")
def args(short_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    args = write_run_args(short_corpus, tmp_path_factory.mktemp("args"))
    return [*args, "--trainer.max_steps", "2"]


@pytest.fixture(scope="module")
def written(args: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of two ranks with sharded checkpoints."""
    run = tmp_path_factory.mktemp("sharded") / "run"
    fit = ["--config", str(STRATEGIES["fsdp"]), *CPU, *args, *SHARDED]
    fit += argv(f"--trainer.devices 2 --run_dir {run}")
    launch("tests.lit.ranks", "sharded_checkpoints", "-1", *fit, logs=run.parent)
    return run


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    """Return a copy of the run, which a test may damage."""
    return Path(shutil.copytree(written, tmp_path / "copy", symlinks=True))


def zero(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def link(file: Path) -> None:
    elsewhere = file.parents[1] / file.name
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


NAMES = ("__0_0.distcp", "__1_0.distcp", "meta.pt", ".metadata", "checksums.json")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", [flip, zero, cut, link, Path.unlink])
def test_check_checkpoint_damaged_shard_is_refused(
    damage: Callable[[Path], None], name: str, run: Path
) -> None:
    checkpoint = run / LAST
    assert {file.name for file in checkpoint.iterdir()} == set(NAMES)
    check_checkpoint(str(checkpoint))
    damage(checkpoint / name)
    with pytest.raises(ConfigError, match=LAST.name):
        check_checkpoint(str(checkpoint))


@pytest.mark.parametrize("task", ["folders", "failed_writes"])
def test_two_ranks_write_to_one_folder(task: str, tmp_path: Path) -> None:
    """The docstring of the task in ranks.py says what it asserts."""
    launch("tests.lit.ranks", task, str(tmp_path), logs=tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_write_sharded_accepts_a_file_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS keeps a file that was removed while a process reads it."""

    def hash_next_to_another(file: Path) -> str:
        (file.parent / ".nfs0001").touch()
        return file_sha256(file)

    monkeypatch.setattr(sharded_write, "file_sha256", hash_next_to_another)
    checkpoint = {"state_dict": {"weight": torch.ones(3)}}
    path = tmp_path / "step-1.ckpt"
    sharded_write.write_sharded(SingleDeviceStrategy(torch.device("cpu")), checkpoint, path)
    assert (path / ".nfs0001").exists()
    assert "__0_0.distcp" in (path / "checksums.json").read_text()


def test_every_reader_refuses_a_damaged_shard(
    run: Path, args: list[str], tmp_path: Path, refused: Refused
) -> None:
    load_backbone(run)
    flip(run / LAST / "__1_0.distcp")
    new = tmp_path / "new"
    for words in commands_that_read(run, args, new):
        assert "__1_0.distcp" in refused(*words)
    assert not new.exists()
