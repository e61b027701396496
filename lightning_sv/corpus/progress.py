"""Progress bars for the long phases of a preparation, and a log file of its parts."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from lightning_sv.corpus.parts import Part

#: seconds between two lines of the log of the parts
LOG_S = 10.0


class _SpeedColumn(TransferSpeedColumn):
    """Bytes per second; empty instead of `?` while it is not known."""

    def render(self, task: Task) -> Text:
        """Return the text of the column."""
        if task.finished_speed is None and task.speed is None:
            return Text("")
        return super().render(task)


@contextmanager
def phase(name: str, total: int | None, *, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error; yield the function that advances it by bytes."""
    columns = (
        SpinnerColumn(),
        TextColumn(f"{name:<16}"),
        BarColumn(),
        _SpeedColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bars:
        task = bars.add_task(name, total=total)
        yield lambda amount: bars.advance(task, amount)
        bars.update(task, total=bars.tasks[task].completed)


def in_threads(
    name: str,
    work: Callable[[Any], int],
    items: Iterable[Any],
    total: int,
    *,
    shown: bool = True,
    threads: int = 8,
) -> None:
    """Call `work` with each item, on some threads, with a progress bar of the bytes it returns."""
    with ThreadPoolExecutor(threads) as pool, phase(name, total, shown=shown) as advance:
        try:
            for done in pool.map(work, items):
                advance(done)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # on an error or Ctrl-C, exit at once


class PartsLog:
    """Log file of the parts: how many are complete, text, speed, tokens, disk and time left.

    Args:
        path: log file, to which lines are appended
        parts: parts of the preparation
        itemsize: bytes per token on the disk
    """

    def __init__(self, path: Path, parts: list[Part], itemsize: int) -> None:
        self.path = path
        self.itemsize = itemsize
        self.total = len(parts)
        self.total_bytes = sum(part.n_bytes for part in parts)
        self.left = parts
        self.done_bytes = 0
        self.text_bytes = 0
        self.tokens = 0
        self._count_complete()
        self._started = monotonic()
        self._logged = self._started
        self._bytes_at_start = self.done_bytes

    def update(self, *, is_last: bool = False) -> None:
        """Append a line, at most every `LOG_S` seconds."""
        now = monotonic()
        if not is_last and now - self._logged < LOG_S:
            return
        self._logged = now
        self._count_complete()
        with self.path.open("a") as file:
            file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {self.line()}\n")

    def _count_complete(self) -> None:
        still = []
        for part in self.left:
            if not part.is_complete():
                still.append(part)
                continue
            summary = part.summary()
            self.done_bytes += part.n_bytes
            self.text_bytes += summary["bytes"]
            self.tokens += summary["tokens"]
        self.left = still

    def line(self) -> str:
        """Return the state in one line; sizes beyond the complete parts are estimates."""
        seconds = monotonic() - self._started
        speed = (self.done_bytes - self._bytes_at_start) / max(seconds, 1e-9)
        left = "unknown"
        if speed:
            left = str(timedelta(seconds=round((self.total_bytes - self.done_bytes) / speed)))
        disk = self.tokens * self.itemsize
        parts_and_shards = 2 * disk
        needed = parts_and_shards * self.total_bytes / max(1, self.done_bytes)
        figures = [
            f"{self.total - len(self.left)}/{self.total} parts",
            f"{self.text_bytes / 1e6:,.1f} MB of text",
            f"{speed / 1e6:.1f} MB/s",
            f"{self.tokens:,} tokens",
            f"{disk / 1e6:,.1f} of {needed / 1e6:,.1f} MB on disk",
            f"{left} left",
        ]
        return ", ".join(figures)
