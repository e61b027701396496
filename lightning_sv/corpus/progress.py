"""Progress bars for the long phases of a preparation and of a check."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TransferSpeedColumn


@contextmanager
def phase(name: str, total: int | None, *, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error during the block; yield the function that advances it by bytes.

    Args:
        name: name of the phase
        total: its size in bytes, None if unknown
        shown: if False, show nothing
    """
    columns = SpinnerColumn(), TextColumn(f"{name:<16}"), BarColumn(), TransferSpeedColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bars:
        task = bars.add_task(name, total=total)
        yield lambda amount: bars.advance(task, amount)
        bars.update(task, total=bars.tasks[task].completed)
