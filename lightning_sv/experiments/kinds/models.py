"""Losses of each arm at several models of a budget, against their size or length of training."""

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar

import pandas as pd

from lightning_sv.errors import ConfigError, expect
from lightning_sv.experiments.arms import Arm, PlannedArm, Series, paired_losses, point_label
from lightning_sv.experiments.kinds.base import LOSS_CLAIMS, Drawing, LoadedPanel, PanelKind
from lightning_sv.experiments.kinds.curves import difference_table
from lightning_sv.experiments.spec import ArmSpec, PanelSpec
from lightning_sv.statistics.line import DifferenceLine, difference_line
from lightning_sv.statistics.paired import PairedDifference
from lightning_sv.statistics.verdicts import interval_text

if TYPE_CHECKING:  # it imports torch, which a report does not need
    from lightning_sv.experiments.budgeted_panel import BudgetedPanel
    from lightning_sv.experiments.run_spec import RunSpec

#: headings of the line of a difference
OFFSET = "difference at the geometric mean size, nats per token (95% interval)"
SLOPE = "change per e-fold of size, below 0: falls faster (95% interval)"


class ModelsKind(PanelKind):
    """Each arm is a series, whose points are models of the budget."""

    claims: ClassVar[tuple[str, ...]] = LOSS_CLAIMS
    fields = ("models",)
    arms_have_models = False
    has_pairs = True
    #: setting whose values name the points
    distinguished_by: str

    def names(self, panel: "BudgetedPanel", run_specs: Sequence["RunSpec"]) -> list[str]:
        """Return the name of each point, from the runs of an arm."""
        raise NotImplementedError

    def value(self, run_spec: "RunSpec") -> float:
        """Return the place of a point on the axis."""
        raise NotImplementedError

    def check(self, panel: PanelSpec) -> None:
        """Check that an arm is the baseline, because only differences are drawn."""
        if panel.baseline is None:
            raise ConfigError("`baseline: true` is set for no arm; expected one arm.")

    def points(self, panel: "BudgetedPanel", label: str, arm: ArmSpec) -> list[PlannedArm]:
        """Resolve an arm with each model."""
        run_specs = [panel.resolve(arm, role) for role in panel.roles]
        names = self.names(panel, run_specs)
        is_distinct = len(set(names)) == len(names)
        expected = f"different ones. Set {self.distinguished_by} of each model of the budget."
        expect(is_distinct, f"its {panel.spec.kind}", ", ".join(names), expected)

        arms = []
        for run_spec, size in zip(run_specs, names, strict=True):
            point = (self.value(run_spec),)
            name = point_label(label, size)
            arms.append(PlannedArm(name, run_spec, series=label, point=point, size=size))
        return sorted(arms, key=attrgetter("point"))  # `models` may have any order

    def kept(self, all_arms: Sequence[Arm]) -> list[Arm]:
        """Return the arms of the series that have runs at all points."""
        return self.in_complete_series(all_arms)


class ScalingKind(ModelsKind):
    """Loss of each arm at several sizes."""

    claims = (*LOSS_CLAIMS, "slope")
    distinguished_by = "model.backbone.name"

    def names(self, panel: "BudgetedPanel", run_specs: Sequence["RunSpec"]) -> list[str]:
        """Return the names of the models."""
        return [run_spec.model for run_spec in run_specs]

    def value(self, run_spec: "RunSpec") -> float:
        """Return the activated parameters."""
        return run_spec.parameters

    def lines(self, panel: LoadedPanel) -> list[tuple[Series, DifferenceLine]]:
        """Return each series but the baseline with its line, unless there is one size.

        Sizes are those of the baseline, because strategies have different numbers of scale vectors.
        """
        baseline = panel.baseline
        if baseline is None or len(set(baseline.values)) < 2:
            return []
        lines = []
        for series in panel.series:
            if not series.baseline:
                line = difference_line(baseline.values, *paired_losses(baseline, series))
                lines.append((series, line))
        return lines

    def table(self, panel: LoadedPanel) -> pd.DataFrame:
        """Return one row per line."""
        rows = []
        for series, line in self.lines(panel):
            rows.append({"arm": series.name, OFFSET: _text(line.offset), SLOPE: _text(line.slope)})
        return pd.DataFrame(rows)

    def draw(self, panel: LoadedPanel) -> Drawing:
        """Draw the losses and the differences by size, and the curves of each size."""
        # matplotlib is slow to import
        from lightning_sv.experiments.report.scaling_plots import scaling_plots

        return scaling_plots(panel)


def _text(d: PairedDifference) -> str:
    return f"{d.mean:+.4f} ({interval_text(d.low, d.high)})"


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
        from lightning_sv.experiments.report.scaling_plots import gap_plot

        points = "training tokens per parameter"
        return Drawing([gap_plot(panel, "lengths", "length of training", points)])
