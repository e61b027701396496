"""Messages of errors, and the end of streams that cannot be written."""

import errno
import os
from contextlib import suppress
from typing import TextIO

from lightning_sv.errors import ConfigError, RunError
from lightning_sv.runs.directory import printable

#: errors for a path that does not exist, has the wrong kind, is not writable, or is invalid
_UNUSABLE = (
    errno.ENOENT,
    errno.EEXIST,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENAMETOOLONG,
    errno.ELOOP,
)


def message_of(error: Exception) -> tuple[str, int] | None:
    """Return the message and exit code of an expected error; None for a bug."""
    if isinstance(error, ConfigError):
        return printable(str(error)), 2  # it may quote a file of unknown origin
    if isinstance(error, OSError) and error.filename and error.errno in _UNUSABLE:
        found = f"{error.filename} cannot be used ({error.strerror})"
        return f"{found}; choose a different path.", 2
    if isinstance(error, OSError | ModuleNotFoundError):
        return f"{type(error).__name__}: {error}", 1
    if isinstance(error, RunError):
        return str(error), 1
    return _of_library(error)


def _of_library(error: Exception) -> tuple[str, int] | None:
    """Return message and exit code of errors of torch, Lightning and pathlib that users cause.

    The classes are compared by name, because importing torch takes seconds.
    """
    text = str(error)
    name = type(error).__name__
    if name == "MisconfigurationException":  # from Lightning, about the trainer's settings
        return text, 2
    if name == "OutOfMemoryError":
        expected = "smaller micro-batches. Lower data.micro_batch."
        return f"the memory of the device is too small; expected {expected}", 1
    if name == "DistNetworkError":  # a port in use, or an address that does not answer
        address = os.environ.get("MASTER_ADDR", "127.0.0.1")
        place = f"{address}:{os.environ.get('MASTER_PORT', '')}"
        found = f"the ranks cannot meet at {place} ({text.splitlines()[0]})"
        return f"{found}; expected a free port. Set MASTER_PORT to one.", 2
    # from pathlib, also for litdata's cache
    if isinstance(error, RuntimeError) and "determine home directory" in text:
        return "HOME is not set; expected a folder for caches. Set it, e.g. HOME=/tmp.", 2
    if text.startswith("DataLoader worker (pid"):  # torch's signal handler raises it at any place
        return text, 1
    return None


def discard(stream: TextIO) -> None:
    """Redirect a stream to the null device, so that flushing it at exit does not fail."""
    with suppress(OSError, ValueError):  # a stream without a file descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()
