"""Loss against tokens, and differences to the baseline."""

import pandas as pd

from lightning_sv.experiments.arms import Arm, baseline_first
from lightning_sv.experiments.kinds.base import LOSS_CLAIMS, Drawing, LoadedPanel, PanelKind
from lightning_sv.experiments.pairs import Pair
from lightning_sv.statistics.verdicts import (
    count_pairs,
    direction,
    interval_text,
    ratio_interval_text,
    times,
)

#: heading of a ratio; above 1, the baseline needs more tokens than the arm
TOKEN_FACTOR = "tokens of the baseline / own tokens"
#: heading of the mean training loss of the last tenth of the steps
LATE_TRAINING = "training loss, last tenth"
#: heading of an interval without pooling, next to the pooled one if the pairs are few
OWN_SCATTER = "by the scatter of the pairs alone"


class CurvesKind(PanelKind):
    """Loss of each arm against training tokens."""

    claims = LOSS_CLAIMS
    has_pairs = True
    shows_copying = True

    def table(self, panel: LoadedPanel) -> pd.DataFrame:
        """Return one row per arm: its losses, and its difference to the baseline."""
        return difference_table(panel)

    def draw(self, panel: LoadedPanel) -> Drawing:
        """Draw the losses, and the differences to the baseline."""
        # matplotlib is slow to import
        from lightning_sv.experiments.report.curve_plots import curve_plots

        return curve_plots(panel)


def difference_table(panel: LoadedPanel) -> pd.DataFrame:
    """Return one row per arm: losses, difference to the baseline, tokens, late training loss."""
    pairs = {pair.b.label: pair for pair in panel.pairs}
    counts = {len(arm.runs) for arm in panel.arms}
    counts |= {pair.difference.n for pair in panel.pairs}
    rows = []
    for arm in baseline_first(panel.arms):
        row = _loss_cells(arm)
        if arm.label in pairs:
            row |= _difference_cells(pairs[arm.label], show_count=len(counts) > 1)
        rows.append(row)
    return pd.DataFrame(rows, columns=_columns(panel), dtype=object).fillna("")


def _columns(panel: LoadedPanel) -> list[str]:
    columns = ["arm", "final loss, nats per token", "each seed", "difference", "95% interval"]
    if any(pair.difference.alone for pair in panel.pairs):
        columns.append(OWN_SCATTER)
    if not panel.spec.claims:  # the verdicts of claims are by one-sided tests
        columns.append("result")
    return [*columns, TOKEN_FACTOR, LATE_TRAINING]


def _loss_cells(arm: Arm) -> dict[str, str]:
    return {
        "arm": arm.name,
        "final loss, nats per token": f"{arm.losses.mean():.4f}",
        "each seed": ", ".join(f"{loss:.4f}" for loss in arm.losses),
        "difference": "baseline" if arm.baseline else "",
        LATE_TRAINING: _late_train_loss(arm),
    }


def _difference_cells(pair: Pair, *, show_count: bool) -> dict[str, str]:
    difference = pair.difference
    interval = interval_text(difference.low, difference.high)
    if show_count:
        interval += f"; {count_pairs(difference.n)}"
    own = difference.alone
    return {
        "difference": f"{difference.mean:+.4f}",
        "95% interval": interval,
        OWN_SCATTER: interval_text(own.low, own.high) if own else "",
        "result": direction(difference),
        TOKEN_FACTOR: _token_factor(pair),
    }


def _token_factor(pair: Pair) -> str:
    efficiency = pair.efficiency
    if not efficiency.has_factor:
        return ""
    factor = times(efficiency.factor)
    if not efficiency.has_interval:
        return factor
    return f"{factor} ({ratio_interval_text(efficiency.low, efficiency.high)})"


def _late_train_loss(arm: Arm) -> str:
    losses = pd.Series([run.late_train_loss for run in arm.runs], dtype=float).dropna()
    if losses.empty:
        return ""
    return f"{sum(losses) / len(losses):.4f}"
