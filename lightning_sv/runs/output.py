"""Messages of errors, and streams that outlast their reader and a full disk."""

import errno
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from lightning_sv.errors import ConfigError, RunError
from lightning_sv.runs.directory import printable

log = logging.getLogger(__name__)

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
    if isinstance(error, OSError | ModuleNotFoundError):
        return _of_system(error)
    if isinstance(error, RunError):
        return str(error), 1
    return _of_library(error)


def _of_system(error: OSError | ModuleNotFoundError) -> tuple[str, int]:
    if isinstance(error, OSError) and error.filename and error.errno in _UNUSABLE:
        found = f"{error.filename} cannot be used ({error.strerror})"
        return f"{found}; choose a different path.", 2
    return f"{type(error).__name__}: {error}", 1


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


class LastingStream:
    """A text stream that ignores failed writes, after a warning with its name."""

    def __init__(self, stream: TextIO, name: str):
        self._stream = stream
        self._name = name

    def write(self, text: str) -> int:
        """Write a text, or discard it after a failure."""
        self._try(lambda: self._stream.write(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        self.write("".join(lines))

    def flush(self) -> None:
        """Flush the stream."""
        self._try(self._stream.flush)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            discard(self._stream)
            if self._name != "stderr":  # to which the warning goes
                log.warning("%s cannot be written (%s); going on", self._name, error.strerror)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Let writes to stdout and stderr fail without an error."""
    before = sys.stdout, sys.stderr
    sys.stdout = before[0] and LastingStream(before[0], "stdout")  # type: ignore[assignment]
    sys.stderr = before[1] and LastingStream(before[1], "stderr")  # type: ignore[assignment]
    try:
        yield
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    finally:
        sys.stdout, sys.stderr = before


def discard(stream: TextIO) -> None:
    """Redirect a stream to the null device, so that flushing it at exit does not fail."""
    with suppress(OSError, ValueError):  # a stream without a file descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()
