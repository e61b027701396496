"""Rows of the overhead table: from the benchmarks on this machine's kind, or from training runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_sv.paper.results import ArmResult


def benchmark_table(path: Path) -> dict[str, Any]:
    """Step times over llama's, as `make bench` wrote them.

    Raises:
        ValueError: The file is not there, or not what `make bench` writes.
    """
    try:
        modes = json.loads(path.read_text())
        rows = [
            [f"{row['name']}, {mode}", row["milliseconds"], row["ratio"], row["low"], row["high"], row["pairs"]]
            for mode, groups in modes.items()
            if isinstance(groups, dict) and "strategies" in groups
            for row in groups["strategies"]
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} has no step times ({error!r}); make bench writes it.") from error
    return {"columns": ["strategy", "ms a step", "over llama", "low", "high", "pairs"], "rows": rows}


def throughput_table(arms: Sequence[ArmResult]) -> dict[str, Any]:
    """Median tokens per second of each arm's runs, after the first half of the run."""
    rows = []
    for arm in arms:
        speeds = [run.curve("throughput/tokens_per_s").values for run in arm.runs]
        rows.append([arm.label, float(np.mean([np.median(x[len(x) // 2 :]) for x in speeds])), len(speeds)])
    return {"columns": ["strategy", "tokens per second", "runs"], "rows": rows}
