"""Atomic writes of files and folders, and a lock for them."""

import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lightning_sv.errors import ConfigError, UnreadableError

log = logging.getLogger(__name__)

#: numbers of OSErrors that readers of formats raise for damaged content, e.g. for an impossible
#: position
_ABOUT_CONTENT = (None, errno.EINVAL)
#: numbers of OSErrors of file systems without an operation, such as NFS without a lock daemon
_NOT_SUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
# Print a message if the lock is not acquired within this many seconds.
_SILENT_WAIT_S = 1.0


@contextmanager
def atomic_path(final: Path) -> Iterator[Path]:
    """Yield a temporary path next to `final` that replaces it atomically; files are synced first.

    `final` is a file or a folder, which must be empty to be replaced. After an error it is
    unchanged. Newly created parent folders are removed again if they stay empty. Only one process
    may write a path at a time.
    """
    partial = partial_of(final)
    created = [folder for folder in final.parents if not folder.exists()]
    final.parent.mkdir(parents=True, exist_ok=True)
    remove(partial)  # left by a process that was killed
    try:
        yield partial
        if partial.is_file():
            sync(partial)
        else:
            _set_modes(partial)
        partial.replace(final)
    finally:
        remove(partial)  # needed if both names were links to one file: then nothing was renamed
        for folder in created:
            with suppress(OSError):  # not empty
                folder.rmdir()


def _set_modes(folder: Path) -> None:
    """Give the files of a folder its mode, because safetensors ignores the umask."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file():
            _set_mode(path, mode)


def _set_mode(path: Path, mode: int) -> None:
    """Set the mode of a file, if its file system has modes; mounted buckets and CIFS refuse."""
    try:
        path.chmod(mode)
    except OSError as error:
        if error.errno not in (*_NOT_SUPPORTED, errno.EPERM):
            raise


def write_atomically(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def locked(target: Path, other: str, *, timeout: float = -1) -> Iterator[None]:
    """Hold the lock of `target`, with a message while waiting for `other`; leave no lock file.

    The parent of `target` is created. `timeout` is in seconds, -1 for no limit; the error after it
    is `filelock.Timeout`, an OSError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    # FileLock would retry forever in a folder that is not writable
    with tempfile.TemporaryFile(dir=target.parent):
        pass
    path = target.parent / f".{target.name}.lock"
    try:
        lock = acquire_lock(path, _SILENT_WAIT_S)
    except Timeout:
        log.info("waiting for another %s (Ctrl-C ends the wait)", other)
        lock = acquire_lock(path, timeout)
    try:
        yield
    finally:
        with suppress(OSError):  # waiting processes create a new lock file
            path.unlink()
        lock.release()


def acquire_lock(path: Path, timeout: float) -> FileLock:
    """Lock a file; if its file system has no locks, log a warning instead.

    filelock's replacement, a file that exists, would stay after its process is killed on a
    different node.

    Raises:
        OSError: `filelock.Timeout` after `timeout` seconds, -1 for no limit; or the file cannot be
            written
    """
    lock = FileLock(path, fallback_to_soft=False)
    try:
        lock.acquire(timeout=timeout)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
        log.warning(
            "%s cannot be locked; do not start a second process that writes to it", path.parent
        )
    return lock


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file, read in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_writable(folder: Path) -> None:
    """Raise NotADirectoryError or PermissionError unless a folder can be written to or created."""
    folder = folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(existing))
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(existing))


def regular(path: Path) -> Path:
    """Return `path`; raise ConfigError if opening it could block: a pipe, a socket or a device."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is not a regular file; choose a different path.")
    return path


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Report an error of the file system as such: it says nothing about the content of a file.

    Raises:
        UnreadableError: names the path, the error and the file's owner
        OSError: that of a reader which reports damaged content by an OSError
    """
    try:
        yield
    except OSError as error:
        if error.errno in _ABOUT_CONTENT:
            raise
        place = error.filename or path
        hint = "This is an error of the file system or of permissions, not of the file's content."
        why = f"{error.strerror}{_owner(place)}"
        raise UnreadableError(
            f"{place} cannot be read ({why}); expected a readable file. {hint}"
        ) from error


def check_readable(path: Path) -> None:
    """Raise UnreadableError if a file cannot be opened, which torch would report as damage."""
    with reading(path), path.open("rb") as file:
        file.read(1)


def _owner(path: str | Path) -> str:
    with suppress(OSError, KeyError, NotImplementedError):  # a user without a name
        return f", owner {Path(path).owner()}"
    return ""


def read_json(path: Path, hint: str) -> dict[str, Any]:
    """Read a JSON object; errors name the file, and end with `hint` if its content is damaged."""
    with reading(path):
        text = regular(path).read_bytes()
    try:
        content = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise ConfigError(f"{path} cannot be read as JSON ({error}); {hint}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object; {hint}")
    return content


def partial_of(final: Path) -> Path:
    """Return the path to which a file or folder is written until it is complete."""
    return final.with_name(f".{final.name}.partial")


def replace(new: Path, final: Path) -> None:
    """Rename `new` to `final`; an old folder of that name is deleted last, so a kill leaves one."""
    old = partial_of(final.with_name(f"old-{final.name}"))
    remove(old)
    if final.is_dir() and not final.is_symlink():
        final.replace(old)
    new.replace(final)
    remove(old)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(FileNotFoundError, NotADirectoryError):  # the latter: its parent is a file
            path.unlink()
