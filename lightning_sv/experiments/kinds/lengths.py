"""Differences to the baseline against the length of training."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from lightning_sv.experiments.kinds.base import Drawing, LoadedPanel
from lightning_sv.experiments.kinds.curves import difference_table
from lightning_sv.experiments.kinds.models import ModelsKind

if TYPE_CHECKING:  # it imports torch, which a report does not need
    from lightning_sv.experiments.budgeted_panel import BudgetedPanel
    from lightning_sv.experiments.run_spec import RunSpec


class LengthsKind(ModelsKind):
    """Loss of each arm after several lengths of training."""

    distinguished_by = "the steps"

    def names(self, panel: "BudgetedPanel", run_specs: Sequence["RunSpec"]) -> list[str]:
        """Return the tokens per parameter of the baseline; arms with more vectors have 1% fewer."""
        baseline = panel.spec.baseline
        assert baseline is not None  # `check` refuses a panel without one
        baselines = [panel.resolve(baseline, role) for role in panel.roles]
        return [f"{run_spec.tokens_per_param:.3g} tokens a parameter" for run_spec in baselines]

    def value(self, run_spec: "RunSpec") -> float:
        """Return the tokens per parameter."""
        return run_spec.tokens_per_param

    def table(self, panel: LoadedPanel) -> pd.DataFrame:
        """Return one row per arm and length."""
        return difference_table(panel)

    def draw(self, panel: LoadedPanel) -> Drawing:
        """Draw the difference to the baseline at each length."""
        # matplotlib is slow to import
        from lightning_sv.experiments.report.scaling_plots import LENGTHS, gap_plot

        return Drawing([gap_plot(panel, {}, LENGTHS)])
