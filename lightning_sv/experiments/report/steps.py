"""Size of the steps of training: the table of a panel."""

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
    means = pd.DataFrame([_mean_steps(arm) for arm in arms])
    roles = sorted(tag for tag in means.columns if tag.startswith(ROLE_STEP))
    if not roles and CLIPPED not in means:
        return pd.DataFrame()

    means = means.reindex(columns=[CLIPPED, *roles])
    table = pd.DataFrame({"arm": [arm.name for arm in arms]}, dtype=object)
    table["clipped steps"] = _texts(means[CLIPPED], "{:.1%}")
    for tag in roles:
        table[f"relative step, {tag.removeprefix(ROLE_STEP)}"] = _texts(means[tag], "{:.2e}")
    return table


def _texts(values: "pd.Series[float]", form: str) -> "pd.Series[str]":
    """Return numbers as texts; empty where they are unknown."""
    return values.map(form.format, na_action="ignore").astype(object).fillna("")


def _mean_steps(arm: Arm) -> dict[str, float]:
    """Average `step_means` over the runs of an arm; a tag that some of them lack is omitted."""
    of_runs = pd.DataFrame([step_means(run) for run in arm.runs])
    means: dict[str, float] = of_runs.dropna(axis="columns").mean().to_dict()
    return means
