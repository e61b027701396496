"""Select and lock the run directory: rank 0 selects it, and one run at a time writes to it."""

import logging
import os
import shutil
from pathlib import Path

from filelock import FileLock, Timeout

from lightning_sv.errors import ConfigError
from lightning_sv.runs.directory import CONFIG, LAST, LOCK, event_files, run_of

log = logging.getLogger(__name__)

#: tells the processes of the other ranks which run directory rank 0 has chosen
RUN_DIR_VARIABLE = "LIGHTNING_SV_RUN_DIR"
#: how long a start waits for the run directory: loader workers outlive a killed run by a few seconds
LOCK_SECONDS = 15


def resolve_run_dir(
    name: str, given: str | None, ckpt_path: str | None, *, again: bool = False, rank: int = 0, create: bool = False
) -> Path:
    """Return the directory of a run about to start.

    Args:
        name: of the model, strategy and seed; where no directory is given, runs/<name>, with a number if taken
        given: run_dir on the command line
        ckpt_path: what the run resumes from; the directory of its run is the default then
        again: a directory that was begun, but holds no checkpoint, is begun again; see `clear_unfinished`
        rank: of this process
        create: if True, make the directory; one that is not named is never that of a run which began meanwhile

    Raises:
        ConfigError: the given directory holds a run, and this one does not resume it; or a checkpoint that lies in no
            run directory is resumed, and no directory is given
        FileExistsError: the given directory is a file
    """
    if rank and RUN_DIR_VARIABLE in os.environ:  # rank 0 started this process and has chosen
        return Path(os.environ[RUN_DIR_VARIABLE])
    if rank:  # torchrun or SLURM started it; only rank 0 writes
        return Path(given or "runs")
    named = given is not None or ckpt_path is not None
    while True:
        path = _choose(name, given, ckpt_path, again)
        try:
            if create:
                path.mkdir(parents=True, exist_ok=named)
            break
        except FileExistsError:
            if named:  # a file
                raise
    os.environ[RUN_DIR_VARIABLE] = str(path)
    return path


def _choose(name: str, given: str | None, ckpt_path: str | None, again: bool) -> Path:
    if given is None and ckpt_path:
        path = run_of(_absolute(ckpt_path))
        if path is None:
            raise ConfigError(f"the checkpoint {ckpt_path} lies in no run directory; add --run_dir, a new one.")
        return path
    if given is None:
        base, number = Path("runs") / name.replace(":", "."), 1  # a strategy's my_module:X is no path for all systems
        path = base
        while path.exists():
            number += 1
            path = base.with_name(f"{base.name}-{number}")
        return path
    path = Path(given)
    _check_free(path, ckpt_path, again)
    return path


def _check_free(path: Path, ckpt_path: str | None, again: bool) -> None:
    begun, saved = (path / CONFIG).exists(), (path / LAST).exists()
    if not (begun or saved) or (again and not saved):
        return
    if ckpt_path is None or not _absolute(ckpt_path).is_relative_to(_absolute(path)):
        other = f", and {ckpt_path} is not of it" if ckpt_path else ""
        what = "delete it, or resume it with --ckpt_path last" if saved else "or delete it: it has no checkpoint"
        raise ConfigError(f"run_dir {path} already holds a run{other}; choose another, {what}.")


def _absolute(path: str | Path) -> Path:
    # links stay as they are: a run's checkpoints may lie on another disk
    return Path(os.path.abspath(path))  # noqa: PTH100


def find_last_checkpoint(run_dir: str | None) -> str | None:
    """What --ckpt_path last means: the checkpoint of `run_dir` if there is one, so that one command starts and resumes.

    Raises:
        ConfigError: no run_dir is given
    """
    if run_dir is None:
        raise ConfigError("ckpt_path 'last' needs a run_dir whose checkpoint it means; add --run_dir.")
    last = Path(run_dir) / LAST
    return str(last) if last.exists() else None


def clear_unfinished(run_dir: Path) -> None:
    """Remove the events and the config of a run that ended before its first checkpoint; to be called once claimed."""
    if not (run_dir / CONFIG).exists():  # events of somebody else
        return
    for file in (*event_files(run_dir), run_dir / CONFIG):
        file.unlink(missing_ok=True)


def acquire(run_dir: Path, ckpt_path: str | None, *, again: bool = False) -> FileLock:
    """Lock a run directory until this process ends, however it ends.

    Raises:
        ConfigError: another process trains there, or has since the directory was chosen
    """
    held = lock(run_dir)
    _check_free(run_dir, ckpt_path, again)
    return held


def lock(run_dir: Path) -> FileLock:
    """Return the lock of a run directory, acquired but where the file system has none.

    Raises:
        ConfigError: a run trains there
    """
    held = FileLock(run_dir / LOCK)
    try:
        held.acquire(timeout=LOCK_SECONDS)
    except Timeout:
        raise ConfigError(f"run_dir {run_dir} is in use by another run; wait for it, or choose another.") from None
    except NotImplementedError:
        log.warning("%s cannot be locked; start no second run there", run_dir)
    return held


def remove(run_dir: Path) -> None:
    """Remove what a run directory holds, but for its lock.

    Raises:
        ConfigError: a run trains there, or the file system cannot tell
    """
    held = lock(run_dir)
    if not held.is_locked:
        raise ConfigError(f"run_dir {run_dir} holds another run, perhaps a live one; remove it yourself.")
    try:
        for each in run_dir.iterdir():
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each)
            elif each.name != LOCK:
                each.unlink()
    finally:
        held.release()
