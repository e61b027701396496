"""Output that cannot end a run: its reader has gone, its disk is full, its terminal is closed."""

import os
import select
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class LastingStream:
    """A text stream whose failing writes are lost; one line on the other stream says so.

    Args:
        stream: stdout or stderr
        name: its name
        other: where the line goes
    """

    def __init__(self, stream: TextIO, name: str, other: TextIO | None):
        self._stream, self._name, self._other = stream, name, other

    def write(self, text: str) -> int:
        """Write what the stream takes."""
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            self._stream.write(text.encode("ascii", "backslashreplace").decode())
        except OSError as error:
            self._lose(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several."""
        self.write("".join(lines))

    def flush(self) -> None:
        """Write what the stream holds back."""
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
    """Let stdout and stderr fail without an error."""
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


def is_unread(stream: TextIO) -> bool:
    """Whether a stream is a pipe that nobody reads any more; where the system cannot tell, it is not."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(mask & select.POLLERR for _, mask in poll.poll(0))
    except (OSError, ValueError, AttributeError):
        return False


def discard(stream: TextIO) -> None:
    """Send what a stream holds, and whatever comes, nowhere; otherwise the interpreter fails on it at its end."""
    with suppress(OSError, ValueError):  # it has no file descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()
