"""Progress bars for the long phases of a preparation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bars


class Progress:
    """One bar a phase on standard error, or silence.

    Args:
        enabled: False shows nothing
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled

    @contextmanager
    def phase(self, name: str, total: int | None, unit: str = "bytes") -> Iterator[Callable[[int], None]]:
        """Show a phase while the block runs; the block calls what it is given with each bit of progress.

        Args:
            name: what is being done
            total: its size, None if only the end will tell
            unit: 'bytes' shows a rate; anything else shows a count
        """
        measure: ProgressColumn = TransferSpeedColumn() if unit == "bytes" else MofNCompleteColumn()
        columns = (
            SpinnerColumn(),
            TextColumn(f"{name:<16}"),
            BarColumn(),
            measure,
            TimeElapsedColumn(),
        )
        with Bars(*columns, console=Console(stderr=True), disable=not self.enabled) as bars:
            task = bars.add_task(name, total=total)
            yield lambda amount: bars.advance(task, amount)
            bars.update(task, total=bars.tasks[task].completed)
