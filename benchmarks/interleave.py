"""Interleaved time ratios, robust on a slow or busy machine."""

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from scipy import stats


@dataclass(frozen=True)
class Ratio:
    """Time of a candidate relative to the reference: mean of paired ratios, 95% interval."""

    name: str
    milliseconds: float  # median
    ratio: float
    low: float
    high: float
    pairs: int


def measure(
    steps: Mapping[str, Callable[[], None]],
    reference: str,
    *,
    rounds: int = 40,
    warmup: int = 3,
    seed: int = 0,
) -> list[Ratio]:
    """Run every step once per round, in random order, and compare within rounds.

    Args:
        steps: name -> one step, which must wait for its own result.
        reference: name of the reference.
        rounds: number of pairs.
        warmup: steps of each that are not counted.
        seed: seed of the orders.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(seed)
    names = list(steps)
    for step in steps.values():
        for _ in range(warmup):
            step()
    with Progress(transient=True) as progress:
        for _ in progress.track(range(rounds), description="interleaved rounds"):
            order.shuffle(names)
            for name in names:
                began = time.perf_counter()
                steps[name]()
                times[name].append(time.perf_counter() - began)
    out = []
    for name in steps:
        logs = [math.log(a / b) for a, b in zip(times[name], times[reference], strict=True)]
        # Interrupted rounds are outliers: trim 10% at each end.
        logs = sorted(logs)[len(logs) // 10 : len(logs) - len(logs) // 10]
        mean = statistics.mean(logs)
        spread = statistics.stdev(logs) if name != reference else 0.0
        half = stats.t.ppf(0.975, len(logs) - 1) * spread / math.sqrt(len(logs))
        out.append(
            Ratio(
                name,
                1e3 * statistics.median(times[name]),
                math.exp(mean),
                math.exp(mean - half),
                math.exp(mean + half),
                len(logs),
            )
        )
    return out


def show(console: Console, title: str, rows: Sequence[Ratio], reference: str) -> None:
    """Print the rows as a table."""
    table = Table(title=title, title_justify="left")
    for column in ("", "ms a step", f"time / {reference}", "95% interval"):
        table.add_column(column, justify="left" if not column else "right")
    for row in rows:
        interval = "" if row.name == reference else f"{row.low:.3f} to {row.high:.3f}"
        table.add_row(row.name, f"{row.milliseconds:.1f}", f"{row.ratio:.3f}", interval)
    console.print(table)
