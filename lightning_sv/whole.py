"""Files and folders that are there whole, or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole(final: Path) -> Iterator[Path]:
    """Yield a path beside `final` that becomes it in one step; a file is on the disk before.

    Folders that are made for it are removed again if nothing comes into them. One process writes one path at a time.

    Args:
        final: a file or a folder; on an error it is what it was, there or not

    Raises:
        OSError: there is no room, or no right to write; or a folder takes the place of one that is not empty
    """
    partial = partial_of(final)
    made = [folder for folder in final.parents if not folder.exists()]
    final.parent.mkdir(parents=True, exist_ok=True)
    remove(partial)  # left by a process that was killed
    try:
        yield partial
        if partial.is_file():
            with partial.open("rb") as file:
                os.fsync(file.fileno())
        partial.replace(final)
    finally:
        remove(partial)  # also where both were names of one file: then nothing was renamed
        for folder in made:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def partial_of(final: Path) -> Path:
    """Where a file or folder is written; its own name says that it is whole."""
    return final.with_name(f".{final.name}.partial")


def remove(path: Path) -> None:
    """Remove a file or folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
