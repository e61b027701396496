"""Output streams that do not end a run if the reader has ended, the disk is full or the terminal is closed."""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class LastingStream:
    """A text stream that ignores failed writes, after a warning on a different stream.

    Args:
        stream: stdout or stderr
        name: its name
        other: stream of the warning; None for no warning
    """

    def __init__(self, stream: TextIO, name: str, other: TextIO | None):
        self._stream, self._name, self._other = stream, name, other

    def write(self, text: str) -> int:
        """Write a text, or discard it after a failure."""
        try:
            self._stream.write(text)
        except OSError as error:
            self._lose(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        self.write("".join(lines))

    def flush(self) -> None:
        """Flush the stream."""
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        discard(self._stream)
        if self._other is not None:
            with suppress(OSError):
                print(f"warning: {self._name} cannot be written ({error.strerror}); going on", file=self._other)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Let writes to stdout and stderr fail without an error."""
    before = sys.stdout, sys.stderr
    out, err = before
    sys.stdout = out and LastingStream(out, "stdout", err)  # type: ignore[assignment]
    sys.stderr = err and LastingStream(err, "stderr", None)  # type: ignore[assignment]
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
