"""Arms with several models of the budget: sizes, or lengths of training."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from lightning_sv.errors import ConfigError, expect
from lightning_sv.experiments.arms import Arm, PlannedArm, point_label
from lightning_sv.experiments.kinds.base import LOSS_CLAIMS, PanelKind
from lightning_sv.experiments.spec import ArmSpec, PanelSpec

if TYPE_CHECKING:  # it imports torch, which a report does not need
    from lightning_sv.experiments.budgeted_panel import BudgetedPanel
    from lightning_sv.experiments.run_spec import RunSpec


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
        return arms

    def kept(self, all_arms: Sequence[Arm]) -> list[Arm]:
        """Return the arms of the series that have runs at all points."""
        return self.in_complete_series(all_arms)
