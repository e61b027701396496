"""Share of clipped steps: the table of a panel."""

import statistics

import pandas as pd

from lightning_sv.experiments.arms import Arm, baseline_first
from lightning_sv.experiments.kinds.base import LoadedPanel
from lightning_sv.experiments.report.results_csv import clipped_share

NOTE = (
    "Mean over training and seeds. A step is clipped if the norm of its gradient is above "
    "gradient_clip_val."
)


def clipped_table(panel: LoadedPanel) -> pd.DataFrame:
    """Return the share of clipped steps of each arm; empty if no arm has one."""
    arms = baseline_first(panel.arms)
    shares = [_mean_share(arm) for arm in arms]
    if not any(shares):
        return pd.DataFrame()
    return pd.DataFrame({"arm": [arm.name for arm in arms], "clipped steps": shares}, dtype=object)


def _mean_share(arm: Arm) -> str:
    """Return the mean over the runs of an arm; an empty text if some of them have none."""
    shares = []
    for run in arm.runs:
        share = clipped_share(run)
        if share is None:
            return ""
        shares.append(share)
    return f"{statistics.fmean(shares):.1%}"
