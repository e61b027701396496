"""Size of the steps of training: the table of a panel."""

from math import isnan

import numpy as np
import pandas as pd

from lightning_sv.experiments.arms import Arm, baseline_first
from lightning_sv.experiments.kinds.base import LoadedPanel
from lightning_sv.experiments.report.results_csv import CLIPPED, ROLE_STEP, step_means

NOTE = (
    "Mean over training and seeds. A step is clipped if the norm of its gradient is above "
    "gradient_clip_val. A relative step is ‖change‖ / ‖value‖ of all parameters of a role, with "
    "weight decay. results.csv also has the relative steps of each branch, if they were measured."
)


def steps_table(panel: LoadedPanel) -> pd.DataFrame:
    """Return the share of clipped steps, and the relative step per role, of each arm."""
    arms = baseline_first(panel.arms)
    rows = pd.DataFrame([_mean_steps(arm) for arm in arms], index=[arm.name for arm in arms])
    roles = sorted(tag for tag in rows.columns if tag.startswith(ROLE_STEP))
    if not roles and CLIPPED not in rows:
        return pd.DataFrame()

    table = pd.DataFrame({"arm": rows.index}, index=rows.index, dtype=object)
    table["clipped steps"] = _texts(rows, CLIPPED, "{:.1%}")
    for tag in roles:
        table[f"relative step, {tag.removeprefix(ROLE_STEP)}"] = _texts(rows, tag, "{:.2e}")
    return table


def _texts(rows: pd.DataFrame, tag: str, form: str) -> list[str]:
    """Return a column as texts; empty where it is unknown."""
    if tag not in rows:
        return [""] * len(rows)
    return ["" if isnan(value) else form.format(value) for value in rows[tag]]


def _mean_steps(arm: Arm) -> dict[str, float]:
    """Average `step_means` over the runs of an arm; a tag that some of them lack is omitted."""
    of_runs = [step_means(run) for run in arm.runs]
    if not of_runs:
        return {}
    shared = set.intersection(*(set(means) for means in of_runs))
    return {tag: float(np.mean([means[tag] for means in of_runs])) for tag in shared}
