"""Size of the steps of training: the table of a panel."""

import numpy as np
import pandas as pd

from lightning_sv.experiments.arms import Arm, baseline_first
from lightning_sv.experiments.kinds.base import LoadedPanel
from lightning_sv.experiments.report.results_csv import CLIPPED, ROLE_STEP, step_means

NOTE = (
    "Mean over training and seeds. A step is clipped if the norm of its gradient is above gradient_clip_val. A "
    "relative step is ‖change‖ / ‖value‖ of all parameters of a role, with weight decay. results.csv also has the "
    "relative steps of each branch, if they were measured."
)


def steps_table(panel: LoadedPanel) -> pd.DataFrame:
    """Return the share of clipped steps and the relative step per role of each arm; empty if none was measured."""
    arms = baseline_first(panel.arms)
    means = [_mean_steps(arm) for arm in arms]
    tags = sorted(set().union(*means))
    roles = [tag for tag in tags if tag.startswith(ROLE_STEP)]
    if not roles and CLIPPED not in tags:
        return pd.DataFrame()

    rows = []
    for arm, mean in zip(arms, means, strict=True):
        row = {"arm": arm.name, "clipped steps": ""}
        if CLIPPED in mean:
            row["clipped steps"] = f"{mean[CLIPPED]:.1%}"
        for tag in roles:
            row[f"relative step, {tag.removeprefix(ROLE_STEP)}"] = f"{mean[tag]:.2e}" if tag in mean else ""
        rows.append(row)
    return pd.DataFrame(rows)


def _mean_steps(arm: Arm) -> dict[str, float]:
    """Average `step_means` over the runs of an arm; a tag that some of them lack is omitted."""
    of_runs = [step_means(run) for run in arm.runs]
    if not of_runs:
        return {}
    shared = set.intersection(*(set(means) for means in of_runs))
    return {tag: float(np.mean([means[tag] for means in of_runs])) for tag in shared}
