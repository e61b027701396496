"""Throughput and memory of runs, without a plot."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from lightning_sv.experiments.arms import Arm
from lightning_sv.experiments.kinds.base import LoadedPanel, PanelKind
from lightning_sv.runs.directory import config_value

_SPEED = "throughput/tokens_per_s"
_MEMORY = "memory/peak_gib"


class TableKind(PanelKind):
    """A table of the cost of runs."""

    claims = ("cost", "memory")
    has_own_pool = True

    def table(self, panel: LoadedPanel) -> pd.DataFrame:
        """Return one row per arm, as text."""
        return throughput_table(panel.arms).map(_cell_text)


def _cell_text(cell: str | float) -> str:
    if isinstance(cell, float):
        return f"{cell:.4g}"
    return str(cell)


def throughput_table(arms: Sequence[Arm]) -> pd.DataFrame:
    """Return tokens per second, peak memory and micro-batch of each arm.

    The first two are medians of the second half of each run.
    """
    rows = []
    for arm in arms:
        rows.append(
            {
                "strategy": arm.label,
                "tokens per second": _late_median(arm, _SPEED),
                "peak memory, GiB": _late_median(arm, _MEMORY),
                "micro-batch": config_value(arm.runs[0].config, "data.micro_batch") or "not stated",
                "runs": len(arm.runs),
            }
        )
    return pd.DataFrame(rows, dtype=object)


def _late_median(arm: Arm, tag: str) -> float:
    """Return the mean over the runs of the median in the second half of each."""
    medians = []
    for run in arm.runs:
        values = run.curve(tag).values
        medians.append(np.median(values[len(values) // 2 :]))
    return float(np.mean(medians))
