"""Throughput and memory of runs, without a plot."""

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
    scalars = (_SPEED, _MEMORY)
    has_own_pool = True

    def table(self, panel: LoadedPanel) -> pd.DataFrame:
        """Return tokens per second, peak memory and micro-batch of each arm.

        The first two are medians of the second half of each run.
        """
        return pd.DataFrame([_cells(arm) for arm in panel.arms])


def _cells(arm: Arm) -> dict[str, str]:
    return {
        "strategy": arm.label,
        "tokens per second": f"{_late_median(arm, _SPEED):.4g}",
        "peak memory, GiB": f"{_late_median(arm, _MEMORY):.4g}",
        "micro-batch": str(config_value(arm.runs[0].config, "data.micro_batch") or "not stated"),
        "runs": str(len(arm.runs)),
    }


def _late_median(arm: Arm, tag: str) -> float:
    """Return the mean over the runs of the median in the second half of each."""
    medians = []
    for run in arm.runs:
        values = run.curve(tag).values
        medians.append(np.median(values[len(values) // 2 :]))
    return float(np.mean(medians))
