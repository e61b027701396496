"""Atomic writes of files and folders."""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_sv.errors import ConfigError


@contextmanager
def atomic_path(final: Path) -> Iterator[Path]:
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
        else:
            mode = partial.stat().st_mode & 0o666  # by the umask, which safetensors' files do not follow
            for each in partial.rglob("*"):
                if each.is_file():
                    each.chmod(mode)
        partial.replace(final)
    finally:
        remove(partial)  # also where both were names of one file: then nothing was renamed
        for folder in made:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def write_atomically(path: Path, text: str) -> None:
    """Write a file in one step: it holds all of the text, or what it held before."""
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8")


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_writable(folder: Path) -> None:
    """Check, before long work, that a folder can be written to or created.

    Args:
        folder: where files will be written; it is not created here

    Raises:
        NotADirectoryError: something else is in its place, or in that of a folder above it
        PermissionError: no right to write
    """
    folder = folder.absolute()
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(there))


def regular(path: Path) -> Path:
    """Return `path`, unless opening it could wait for ever: a pipe, a socket, a device.

    Raises:
        ConfigError: something exists there, and it is no regular file
    """
    if path.exists() and not path.is_file():
        what = next((name for name, is_it in _KINDS.items() if is_it(path)), "not a file")
        raise ConfigError(f"{path} is {what}; expected a regular file. Remove it, or name another.")
    return path


_KINDS = {"a folder": Path.is_dir, "a named pipe": Path.is_fifo, "a socket": Path.is_socket}


def partial_of(final: Path) -> Path:
    """Where a file or folder is written; its own name says that it is whole."""
    return final.with_name(f".{final.name}.partial")


def remove(path: Path) -> None:
    """Remove a file or folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
