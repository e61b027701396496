"""Output streams that do not end a run if the reader has ended, the disk is full or the terminal is closed."""

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

log = logging.getLogger(__name__)


class LastingStream:
    """A text stream that ignores failed writes, after a warning with its `name`, stdout or stderr."""

    def __init__(self, stream: TextIO, name: str):
        self._stream, self._name = stream, name

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
    """Redirect a stream to the null device; otherwise the interpreter would fail at exit, when it flushes it."""
    with suppress(OSError, ValueError):  # a stream without a file descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()
