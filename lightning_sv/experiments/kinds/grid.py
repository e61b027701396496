"""Loss against settings of a grid, and the optimum of each arm."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING

from lightning_sv.errors import ConfigError, expect
from lightning_sv.experiments.arms import Arm, PlannedArm
from lightning_sv.experiments.kinds.base import Drawing, LoadedPanel, PanelKind
from lightning_sv.experiments.spec import ArmSpec, PanelSpec, values_under

if TYPE_CHECKING:  # it imports torch, which a report does not need
    from lightning_sv.experiments.budgeted_panel import BudgetedPanel
    from lightning_sv.experiments.run_spec import RunSpec

#: first seed of grids; comparisons at tuned values do not use these seeds, so that the selection
#: does not bias them
TUNING_SEED = 100


class GridKind(PanelKind):
    """Loss at all combinations of some settings, on seeds of its own."""

    claims = ("grid_gap", "sensitivity")
    fields = ("axes", "one_at_a_time")
    arms_have_models = False
    has_own_pool = True
    lost_runs = "Such points are left out."

    def check(self, panel: PanelSpec) -> None:
        """Check that the grid varies no key that all points have in common, or rates alone."""
        for key in panel.axes.keys() & {"model.tokens_per_param", "trainer.max_steps"}:
            expected = "other keys, because all points have the same steps"
            raise ConfigError(f"axes has {key}; expected {expected}. Use kind 'lengths'.")
        for claim in panel.claims:
            if claim.kind == "sensitivity":
                expected = "model.optim.lr alone, because of its claim 'sensitivity'."
                expect([*panel.axes] == ["model.optim.lr"], "axes", [*panel.axes], expected)

    def why_not(self, panel: "BudgetedPanel") -> str | None:
        """Return a sentence if the budget has no values."""
        if panel.axes:
            return None
        return "no grid is given for it"

    def first_seed(self, panel: "BudgetedPanel") -> int:
        """Return the first tuning seed."""
        return TUNING_SEED

    def points(self, panel: "BudgetedPanel", label: str, arm: ArmSpec) -> list[PlannedArm]:
        """Resolve an arm at each point of the grid."""
        budget = panel.budget.name
        own = values_under(budget, arm.axes)
        axes = {key: own.get(key, values) for key, values in panel.axes.items()}
        points = grid_points(axes)
        if budget in panel.spec.one_at_a_time:
            points = cross_points(axes)
        arms = []
        for point in points:
            run_spec = panel.resolve(arm, panel.spec.model, point)
            arms.append(grid_arm(label, point, run_spec))
        return arms

    def lacking(self, arms: Sequence[Arm]) -> list[Arm]:
        """Return the points without runs; those that diverged count."""
        return [arm for arm in arms if not arm.has_ended]

    def kept(self, all_arms: Sequence[Arm]) -> list[Arm]:
        """Return the points at which no run diverged, of the series with runs at all points."""
        return [arm for arm in self.in_complete_series(all_arms) if not arm.diverged]

    def draw(self, panel: LoadedPanel) -> Drawing:
        """Draw the loss against each setting, with the optimum."""
        # matplotlib is slow to import
        from lightning_sv.experiments.report.grid_plots import grid_plots

        return grid_plots(panel)


def grid_points(axes: Mapping[str, Sequence[float]]) -> list[dict[str, float]]:
    """Return all combinations of the values of the axes, each as key -> value."""
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def cross_points(axes: Mapping[str, Sequence[float]]) -> list[dict[str, float]]:
    """Return the points that differ from the first values in one axis at most."""
    first = {key: values[0] for key, values in axes.items()}
    points = []
    for point in grid_points(axes):
        changes = point.items() - first.items()
        if len(changes) <= 1:
            points.append(point)
    return points


def grid_arm(series: str, point: Mapping[str, float], run_spec: "RunSpec") -> PlannedArm:
    """Return one point of a series, named by its values."""
    settings = [f"{key.rpartition('.')[2]} {value:g}" for key, value in point.items()]
    label = ", ".join([series, *settings])
    return PlannedArm(label, run_spec, series=series, point=tuple(point.values()))
