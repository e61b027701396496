"""Progress bars for the long phases of a preparation."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TransferSpeedColumn

#: bytes of work in threads below which no bar is shown, because it takes a second or less
_SHOWN_BYTES = 1 << 28


@contextmanager
def phase(name: str, total: float, *, shown: bool = True) -> Iterator[Callable[..., None]]:
    """Show a progress bar on standard error; yield the function that advances it by bytes."""
    columns = (SpinnerColumn(), *Progress.get_default_columns(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bars:
        number = bars.add_task(f"{name:<16}", total=total)
        yield partial(bars.advance, number)
        bars.tasks[number].total = bars.tasks[number].completed


def in_threads(name: str, work: Callable[[Any], int], items: Iterable[Any], total: int) -> None:
    """Call `work` with each item, on eight threads, with a progress bar of the bytes it returns."""
    shown = total > _SHOWN_BYTES
    with ThreadPoolExecutor(8) as pool, phase(name, total, shown=shown) as advance:
        for done in pool.map(work, items):  # an error cancels the work that has not begun
            advance(done)
