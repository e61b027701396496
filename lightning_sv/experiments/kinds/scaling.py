"""Loss against the size of the model, with scaling laws."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import pandas as pd

from lightning_sv.errors import expect
from lightning_sv.experiments.arms import (
    Arm,
    PlannedArm,
    Series,
    without_incomplete_series,
)
from lightning_sv.experiments.kinds.base import (
    LOSS_CLAIMS,
    Choices,
    Drawing,
    LoadedPanel,
    PanelKind,
)
from lightning_sv.experiments.spec import ArmSpec, PanelSpec
from lightning_sv.statistics.scaling import ScalingFit
from lightning_sv.statistics.verdicts import interval_text

if TYPE_CHECKING:  # it imports torch, which a report does not need
    from lightning_sv.experiments.resolver import RunResolver
    from lightning_sv.experiments.run_spec import RunSpec


class ScalingKind(PanelKind):
    """Loss of each arm at several sizes; the points of a series are models of the budget."""

    claims: ClassVar[tuple[str, ...]] = (*LOSS_CLAIMS, "slope")
    fields = ("models",)
    arms_have_models = False
    has_pairs = True
    has_laws = True
    #: setting whose values name the points
    distinguished_by = "model.backbone.name"

    def problems(self, panel: PanelSpec) -> Iterator[str]:
        """Yield an error if no arm is the baseline, because only differences are drawn."""
        if not any(arm.baseline for arm in panel.arms.values()):
            yield "`baseline: true` is set for no arm; expected one arm."

    def warnings(self, panel: PanelSpec, choices: Choices) -> list[str]:
        """Warn about a slope of few sizes."""
        if len(choices.roles) >= 4:
            return []
        return [f"{panel.title}: {len(choices.roles)} sizes; a slope needs four or more."]

    def points(
        self, panel: PanelSpec, label: str, arm: ArmSpec, resolver: "RunResolver", choices: Choices
    ) -> list[PlannedArm]:
        """Resolve an arm with each model."""
        run_specs = [resolver.resolve(panel, arm, role) for role in choices.roles]
        names = self.point_names(panel, run_specs, resolver, choices)
        expected = f"different ones. Set {self.distinguished_by} of each model of the budget."
        is_distinct = len(set(names)) == len(names)
        expect(is_distinct, f"panel {panel.title!r}: its {panel.kind}", ", ".join(names), expected)

        arms = []
        for spec, size in zip(run_specs, names, strict=True):
            point = (self.value(spec),)
            arms.append(PlannedArm(f"{label}, {size}", spec, series=label, point=point, size=size))
        return arms

    def point_names(
        self,
        panel: PanelSpec,
        run_specs: Sequence["RunSpec"],
        resolver: "RunResolver",
        choices: Choices,
    ) -> list[str]:
        """Return the names of the models."""
        return [run_spec.model for run_spec in run_specs]

    def value(self, run_spec: "RunSpec") -> float:
        """Return the activated parameters."""
        return run_spec.parameters

    def kept(self, every: Sequence[Arm]) -> list[Arm]:
        """Return the arms of the series that have runs at all points."""
        return without_incomplete_series(every, self.lacking(every))

    def table(self, panel: LoadedPanel) -> pd.DataFrame:
        """Return one row per series and form of its law."""
        rows = []
        for series, baseline, fit in laws(panel):
            offset = f"{fit.offset.mean:+.4f} ({interval_text(fit.offset.low, fit.offset.high)})"
            slope = f"{fit.slope.mean:+.4f} ({interval_text(fit.slope.low, fit.slope.high)})"
            rows.append(
                {
                    "arm": series.name,
                    "law": fit.b.formula(),
                    f"law of {baseline.label}": fit.a.formula(),
                    "offset in the middle of the sizes, nats per token (95% interval)": offset,
                    "slope difference, above 0: falls faster (95% interval)": slope,
                    "residual, nats per token": f"{fit.residual:.4f}",
                }
            )
        return pd.DataFrame(rows)

    def draw(self, panel: LoadedPanel) -> Drawing:
        """Draw the laws, the difference at each size, and the curves of each size."""
        # matplotlib is slow to import
        from lightning_sv.experiments.report.scaling_plots import scaling_plots

        return scaling_plots(panel)


def laws(panel: LoadedPanel) -> list[tuple[Series, Series, ScalingFit]]:
    """Return (series, series of the baseline, fit of both) per series and form of the law."""
    baseline = panel.baseline
    if baseline is None:
        return []
    fits, _ = panel.fits
    found = []
    for series in panel.series:
        for fit in fits.get(series.label, ()):
            found.append((series, baseline, fit))
    return found
