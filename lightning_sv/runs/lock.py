"""Select and lock the run directory: rank 0 selects it, and one run at a time writes to it."""

import os
from pathlib import Path

from filelock import FileLock, Timeout

from lightning_sv.atomic import acquire_lock
from lightning_sv.errors import ConfigError
from lightning_sv.runs.directory import CONFIG, LAST, LOCK, event_files, run_of, without_dots

#: environment variable with the run directory, from rank 0 for the processes of other ranks
RUN_DIR_VARIABLE = "LIGHTNING_SV_RUN_DIR"
#: timeout for the lock; loader workers outlive a killed run by a few seconds
LOCK_SECONDS = 15


def check_run_dir(given: str | None, ckpt_path: str | None, *, again: bool = False) -> None:
    """Check that a run may start in a directory; `acquire` checks it again with the lock.

    Args:
        given: run_dir on the command line; None for that of `ckpt_path`, or a new one
        ckpt_path: checkpoint from which the run resumes
        again: if True, the directory may have a run without a checkpoint, see `clear_unfinished`

    Raises:
        ConfigError: the given directory has a run that is not resumed, or no directory is given to
            resume a checkpoint outside of one
    """
    if given is not None:
        _check_free(Path(given), ckpt_path, again)
    elif ckpt_path is not None:
        _resumed_dir(ckpt_path)


def make_run_dir(name: str, given: str | None, ckpt_path: str | None) -> Path:
    """Make the directory of a run on rank 0, and record it for the processes of other ranks.

    Args:
        name: name of model, strategy and seed; the default directory is runs/<name>, with a number
            if it exists
        given: run_dir on the command line
        ckpt_path: checkpoint from which the run resumes; its run directory is the default

    Raises:
        FileExistsError: the given directory is a file
    """
    if given is not None:
        path = Path(given)
    elif ckpt_path is not None:
        path = _resumed_dir(ckpt_path)
    else:
        plain_name = name.replace(":", ".")  # not all systems allow the colon of my_module:X
        path = _make_new(Path("runs") / plain_name)
    path.mkdir(parents=True, exist_ok=True)
    os.environ[RUN_DIR_VARIABLE] = str(path)
    return path


def run_dir_of_first_rank(given: str | None) -> Path:
    """Return the run directory on a different rank.

    If rank 0 did not start this process, as under torchrun and SLURM, the directory may be a
    different one; only rank 0 writes to it.
    """
    return Path(os.environ.get(RUN_DIR_VARIABLE, given or "runs"))


def _resumed_dir(ckpt_path: str) -> Path:
    run = run_of(Path(ckpt_path))
    if run is None:
        hint = (
            "Add --run_dir with a new folder. "
            "ModelCheckpoint's own folders need auto_insert_metric_name: false."
        )
        expected = "a file below the checkpoints of a run"
        raise ConfigError(f"ckpt_path is {ckpt_path}; expected {expected}. {hint}")
    return run


def _make_new(base: Path) -> Path:
    """Make the directory `base`, with a number if it exists, so that each run has its own."""
    path = base
    number = 1
    while not _make(path):
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def _make(path: Path) -> bool:
    """Make a directory; return False if it exists."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        return False
    return True


def _check_free(path: Path, ckpt_path: str | None, again: bool) -> None:
    """Check that a directory has no run, the run of `ckpt_path`, or with `again` no checkpoint."""
    has_checkpoint = os.path.lexists(path / LAST)
    has_config = (path / CONFIG).exists() and not again
    if not has_checkpoint and not has_config:
        return
    found = f"run_dir {path} already contains a run"
    if ckpt_path is not None:
        if without_dots(ckpt_path).is_relative_to(without_dots(path)):
            return
        found += f", and {ckpt_path} is not its checkpoint"
    hint = "choose a different one, or resume it with --ckpt_path last."
    raise ConfigError(f"{found}; {hint}")


def find_last_checkpoint(run_dir: str | None) -> str | None:
    """Return the checkpoint of `run_dir` for `--ckpt_path last`, or None to start a new run."""
    if run_dir is None:
        expected = "the run to resume, because ckpt_path is 'last'. Add --run_dir."
        raise ConfigError(f"run_dir is not set; expected {expected}")
    last = Path(run_dir) / LAST
    if not os.path.lexists(last):
        return None
    if not last.exists():
        hint = "Resume a different one with --ckpt_path FILE."
        expected = "a link to a checkpoint that exists"
        raise ConfigError(f"ckpt_path is {last}; expected {expected}. {hint}")
    return str(last)


def clear_unfinished(run_dir: Path) -> None:
    """Remove events and config of a run without a checkpoint; call it after `acquire`."""
    if not (run_dir / CONFIG).exists():  # events of an unknown program
        return
    for file in (*event_files(run_dir), run_dir / CONFIG):
        file.unlink(missing_ok=True)


def remove_unused(run_dir: Path) -> None:
    """Remove the directory of a run that was refused before it wrote a file.

    Call it after the lock is released.
    """
    names = {file.name for file in run_dir.iterdir()}
    if names <= {LOCK}:
        (run_dir / LOCK).unlink(missing_ok=True)
        run_dir.rmdir()


def acquire(run_dir: Path, ckpt_path: str | None, *, again: bool = False) -> FileLock:
    """Lock a run directory until this process ends; without a lock if the file system has none."""
    try:
        held = acquire_lock(run_dir / LOCK, LOCK_SECONDS)
    except Timeout:
        found = f"run_dir {run_dir} is in use by a different run"
        hint = "Choose a different one, or wait until that run ends."
        raise ConfigError(f"{found}; expected a free directory. {hint}") from None
    _check_free(run_dir, ckpt_path, again)
    return held
