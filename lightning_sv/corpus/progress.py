"""Progress bars for the long phases of a preparation."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TransferSpeedColumn


@contextmanager
def phase(name: str, total: int | None, *, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error during the block; yield the function that advances it by bytes."""
    columns = SpinnerColumn(), TextColumn(f"{name:<16}"), BarColumn(), TransferSpeedColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bars:
        task = bars.add_task(name, total=total)
        yield lambda amount: bars.advance(task, amount)
        bars.update(task, total=bars.tasks[task].completed)


def in_threads(name: str, work: Callable[[Any], int], items: Iterable[Any], total: int, *, shown: bool = True) -> None:
    """Call `work` with each item, on up to 8 threads, and advance a progress bar by the bytes that it returns."""
    with ThreadPoolExecutor(8) as pool, phase(name, total, shown=shown) as advance:
        try:
            for done in pool.map(work, items):
                advance(done)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # on an error or Ctrl-C, exit at once
