"""Loss against the size of the model, with scaling laws."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from lightning_sv.experiments.kinds.base import LOSS_CLAIMS, Drawing, LoadedPanel
from lightning_sv.experiments.kinds.models import ModelsKind
from lightning_sv.experiments.laws import FittedLaws, fit_laws
from lightning_sv.statistics.paired import PairedDifference
from lightning_sv.statistics.scaling import FEWEST_SIZES
from lightning_sv.statistics.verdicts import interval_text

if TYPE_CHECKING:  # it imports torch, which a report does not need
    from lightning_sv.experiments.budgeted_panel import BudgetedPanel
    from lightning_sv.experiments.run_spec import RunSpec


class ScalingKind(ModelsKind):
    """Loss of each arm at several sizes."""

    claims = (*LOSS_CLAIMS, "slope")
    distinguished_by = "model.backbone.name"

    def warnings(self, panel: "BudgetedPanel") -> list[str]:
        """Warn about a slope of few sizes."""
        count = len(panel.roles)
        if count >= FEWEST_SIZES:
            return []
        return [f"{panel.spec.title}: {count} sizes; a slope needs four or more."]

    def names(self, panel: "BudgetedPanel", run_specs: Sequence["RunSpec"]) -> list[str]:
        """Return the names of the models."""
        return [run_spec.model for run_spec in run_specs]

    def value(self, run_spec: "RunSpec") -> float:
        """Return the activated parameters."""
        return run_spec.parameters

    def laws(self, panel: LoadedPanel) -> list[FittedLaws]:
        """Return the laws of each series that can be fitted, in each form."""
        baseline = panel.baseline
        if baseline is None:
            return []
        fits, _ = fit_laws(panel.series)
        laws: list[FittedLaws] = []
        for series in panel.series:
            if series.label in fits:
                laws += [FittedLaws(series, baseline, fit) for fit in fits[series.label]]
        return laws

    def table(self, panel: LoadedPanel) -> pd.DataFrame:
        """Return one row per series and form of its law."""
        return pd.DataFrame([_law_cells(law) for law in self.laws(panel)])

    def draw(self, panel: LoadedPanel) -> Drawing:
        """Draw the laws, the difference at each size, and the curves of each size."""
        # matplotlib is slow to import
        from lightning_sv.experiments.report.scaling_plots import scaling_plots

        return scaling_plots(panel)


def _law_cells(law: FittedLaws) -> dict[str, str]:
    fit = law.fit
    return {
        "arm": law.series.name,
        "law": fit.b.formula(),
        f"law of {law.baseline.label}": fit.a.formula(),
        "offset in the middle of the sizes, nats per token (95% interval)": _text(fit.offset),
        "slope difference, above 0: falls faster (95% interval)": _text(fit.slope),
        "residual, nats per token": f"{fit.residual:.4f}",
    }


def _text(d: PairedDifference) -> str:
    return f"{d.mean:+.4f} ({interval_text(d.low, d.high)})"
