"""Interleaved steps of several models, in the order ABCD DCBA: drift affects all equally."""

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from scipy import stats

from benchmarks.gpu.clock import Clock


def interleaved(
    steps: Mapping[str, Callable[[], None]],
    clock: Clock,
    *,
    rounds: int,
    each: int,
    enough: Callable[[], bool] = lambda: False,
) -> dict[str, list[float]]:
    """Return the milliseconds per model and round, mean over the steps of its two turns.

    A round has one turn of each model and one in reverse order, so that linear drift cancels.

    Args:
        steps: name -> one step, warmed up.
        clock: clock of the device.
        rounds: number of rounds.
        each: steps per turn; the first is not counted, because it follows another model's.
        enough: called between rounds; True stops.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        if number and enough():
            break
        turns: dict[str, list[float]] = {name: [] for name in steps}
        for name in (*steps, *reversed(steps)):
            turns[name] += clock.times(steps[name], each + 1)[1:]
        for name, values in turns.items():
            times[name].append(statistics.fmean(values))
    return times


def ratios(times: Mapping[str, list[float]], reference: str) -> dict[str, dict[str, Any]]:
    """Return the median time, and the ratio to the reference: geometric mean, 95% t interval."""
    out = {}
    for name, values in times.items():
        row: dict[str, Any] = {
            "ms": statistics.median(values),
            "rounds": len(values),
            "all_ms": values,
        }
        logs = [math.log(a / b) for a, b in zip(values, times[reference], strict=True)]
        mean = statistics.fmean(logs)
        row["ratio"] = math.exp(mean)
        if name != reference and len(logs) > 1:
            half = stats.t.ppf(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
            row |= {"low": math.exp(mean - half), "high": math.exp(mean + half)}
        out[name] = row
    return out
