"""The lock of a run directory: one run at a time."""

import shutil
import sys
from pathlib import Path

from filelock import FileLock, Timeout

#: how long a start waits for the run directory: loader workers outlive a killed run by a few seconds
LOCK_SECONDS = 15


def lock(run_dir: Path) -> FileLock:
    """Return the lock of a run directory, acquired but where the file system has none.

    Raises:
        ValueError: a run trains there.
    """
    held = FileLock(run_dir / ".lock")
    try:
        held.acquire(timeout=LOCK_SECONDS)
    except Timeout:
        raise ValueError(f"run_dir {run_dir} is in use by another run; wait for it, or choose another.") from None
    except NotImplementedError:
        print(f"warning: {run_dir} cannot be locked; start no second run there", file=sys.stderr)
    return held


def remove(run_dir: Path) -> None:
    """Remove what a run directory holds, but for its lock.

    Raises:
        ValueError: a run trains there, or the file system cannot tell.
    """
    held = lock(run_dir)
    if not held.is_locked:
        raise ValueError(f"run_dir {run_dir} holds another run, perhaps a live one; remove it yourself.")
    try:
        for each in run_dir.iterdir():
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each)
            elif each.name != ".lock":
                each.unlink()
    finally:
        held.release()
