"""The run directory: chosen by rank 0, claimed by one run at a time, written to from the first step on."""

import os
from pathlib import Path
from typing import Any

from filelock import FileLock
from lightning.fabric.loggers.logger import _DummyExperiment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import TensorBoardLogger
from torch import distributed

from lightning_sv.runs.lock import lock

#: tells the processes of the other ranks which run directory rank 0 has chosen
RUN_DIR_VARIABLE = "LIGHTNING_SV_RUN_DIR"
#: the checkpoint, inside a run directory
LAST = Path("checkpoints") / "last.ckpt"


def choose(name: str, given: str | None, ckpt_path: str | None, *, again: bool = False) -> Path:
    """Return the directory of a run about to start.

    Args:
        name: of the model, strategy and seed; where no directory is given, runs/<name>, with a number if taken.
        given: run_dir on the command line.
        ckpt_path: what the run resumes from; the directory of its run is the default then.
        again: a directory that was begun, but holds no checkpoint, is begun again; see `clear`.

    Raises:
        ValueError: the given directory holds a run, and this one does not resume it; or a checkpoint that lies in no
            run directory is resumed, and no directory is given.
    """
    if rank() and RUN_DIR_VARIABLE in os.environ:  # rank 0 started this process and has chosen
        return Path(os.environ[RUN_DIR_VARIABLE])
    if rank():  # torchrun or SLURM started it; only rank 0 writes
        return Path(given or "runs")
    path = _choose(name, given, ckpt_path, again)
    os.environ[RUN_DIR_VARIABLE] = str(path)
    return path


def _choose(name: str, given: str | None, ckpt_path: str | None, again: bool) -> Path:
    if given is None and ckpt_path:
        folder = _absolute(ckpt_path).parent
        if folder.name != LAST.parent.name or not (folder.parent / "config.yaml").exists():
            raise ValueError(f"the checkpoint {ckpt_path} lies in no run directory; add --run_dir, a new one.")
        return folder.parent
    if given is None:
        base, number = Path("runs") / name, 1
        path = base
        while path.exists():
            number += 1
            path = base.with_name(f"{base.name}-{number}")
        return path
    path = Path(given)
    _refuse_taken(path, ckpt_path, again)
    return path


def _refuse_taken(path: Path, ckpt_path: str | None, again: bool) -> None:
    begun, saved = (path / "config.yaml").exists(), (path / LAST).exists()
    if not (begun or saved) or (again and not saved):
        return
    if ckpt_path is None or not _absolute(ckpt_path).is_relative_to(_absolute(path)):
        other = f", and {ckpt_path} is not of it" if ckpt_path else ""
        what = "delete it, or resume it with --ckpt_path last" if saved else "or delete it: it has no checkpoint"
        raise ValueError(f"run_dir {path} already holds a run{other}; choose another, {what}.")


def _absolute(path: str | Path) -> Path:
    # links stay as they are: a run's checkpoints may lie on another disk
    return Path(os.path.abspath(path))  # noqa: PTH100


def last_checkpoint(run_dir: str | None) -> str | None:
    """What --ckpt_path last means: the checkpoint of `run_dir` if there is one, so that one command starts and resumes.

    Raises:
        ValueError: no run_dir is given.
    """
    if run_dir is None:
        raise ValueError("ckpt_path 'last' needs a run_dir whose checkpoint it means; add --run_dir.")
    last = Path(run_dir) / LAST
    return str(last) if last.exists() else None


def clear(run_dir: Path) -> None:
    """Remove the events and the config of a run that ended before its first checkpoint; to be called once claimed."""
    if not (run_dir / "config.yaml").exists():  # events of somebody else
        return
    for file in (*run_dir.glob("events.out.tfevents.*"), run_dir / "config.yaml"):
        file.unlink(missing_ok=True)


def claim(run_dir: Path, ckpt_path: str | None, *, again: bool = False) -> FileLock:
    """Lock a run directory until this process ends, however it ends.

    Args:
        run_dir: as chosen.
        ckpt_path: what the run resumes from.
        again: see `choose`.

    Raises:
        ValueError: another process trains there, or has since the directory was chosen.
    """
    held = lock(run_dir)
    _refuse_taken(run_dir, ckpt_path, again)
    return held


class RunLogger(TensorBoardLogger):
    """TensorBoard's logger, silent until `opened`: a run that is refused while it is set up leaves no event file."""

    opened = False

    @property
    def experiment(self) -> Any:
        """The writer; Lightning asks for it before the checkpoint is read."""
        return super().experiment if self.opened else _DummyExperiment()

    def save(self) -> None:
        """Write what is not yet on the disk."""
        if self.opened:
            super().save()


def replace(path: Path, text: str) -> None:
    """Write a file in one step: it holds all of the text, or what it held before."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def rank() -> int:
    """Rank of this process, before anything is connected."""
    return int(getattr(rank_zero_only, "rank", 0) or 0)


def is_first_of_node() -> bool:
    """Whether this process reads the shards for all of its node."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0))) == 0


def leave_group() -> None:
    """At exit: Lightning does so for NCCL alone, and the threads of gloo can abort an exit that leaves them behind."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
