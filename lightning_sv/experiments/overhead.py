"""Rows of the overhead table: from the benchmarks on this machine's kind, or from training runs."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lightning_sv.experiments.results import Arm, Table


def benchmark_table(path: Path) -> Table:
    """Step times over llama's, as `make bench` wrote them, and on what.

    Raises:
        ValueError: the file is not there, or not what `make bench` writes
    """
    try:
        modes = json.loads(path.read_text())
        rows = tuple(
            (f"{row['name']}, {mode}", row["milliseconds"], row["ratio"], row["low"], row["high"], row["pairs"])
            for mode, groups in modes.items()
            if isinstance(groups, dict) and "strategies" in groups
            for row in groups["strategies"]
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} has no step times ({error!r}); make bench writes it.") from error
    machine = ", ".join(f"{key} {value}" for key, value in modes.get("machine", {}).items()) or "machine not stated"
    note = f"Measured apart from this page ({path}): {machine}."
    return Table(("strategy", "ms a step", "over llama", "low", "high", "pairs"), rows, note)


def throughput_table(arms: Sequence[Arm]) -> Table:
    """Medians after the first half of each arm's runs: tokens per second, peak memory; sequences at a time."""

    def late(arm: Arm, tag: str) -> float:
        return float(np.mean([np.median(x[len(x) // 2 :]) for x in (run.curve(tag).values for run in arm.runs)]))

    def batch(arm: Arm) -> str | float:
        return (arm.runs[0].config.get("data") or {}).get("micro_batch") or "not stated"

    speed, memory = "throughput/tokens_per_s", "memory/peak_gib"
    columns = ("strategy", "tokens per second", "peak memory, GiB", "micro-batch", "runs")
    rows = tuple((arm.label, late(arm, speed), late(arm, memory), batch(arm), len(arm.runs)) for arm in arms)
    return Table(columns, rows)
