"""Loss against settings of a grid, and the optimum of each arm."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING

from lightning_sv.errors import NotTestableError
from lightning_sv.experiments.arms import Arm
from lightning_sv.experiments.kinds.base import Choices, Drawing, LoadedPanel, PanelKind, Point
from lightning_sv.experiments.spec import ArmSpec, PanelSpec

if TYPE_CHECKING:  # it imports torch, which a report does not need
    from lightning_sv.experiments.run_spec import RunResolver

#: first seed of grids; comparisons at tuned values do not use these seeds, so that the selection does not bias them
TUNING_SEED = 100


class GridKind(PanelKind):
    """Loss at all combinations of some settings, on seeds of its own."""

    claims = ("grid_gap", "sensitivity")
    fields = ("axes", "one_at_a_time")
    arms_have_models = False
    has_own_pool = True
    has_optima = True
    lost_runs = "Such points are left out."

    def problems(self, panel: PanelSpec) -> Iterator[str]:
        """Yield errors: keys that a grid cannot vary."""
        for key in panel.axes.keys() & {"model.tokens_per_param", "trainer.max_steps"}:
            yield f"axes has {key}; expected other keys, because all points have the same steps. Use kind 'lengths'."

    def why_not(self, choices: Choices) -> str | None:
        """Return a sentence if the budget has no values."""
        return None if choices.axes else "no grid is given for it"

    def first_seed(self, choices: Choices) -> int:
        """Return the first tuning seed."""
        return TUNING_SEED

    def points(
        self, panel: PanelSpec, label: str, arm: ArmSpec, resolver: "RunResolver", choices: Choices
    ) -> list[Point]:
        """Resolve an arm at each point of the grid."""
        values = [arm.axes.get(key, {}).get(choices.budget, default) for key, default in choices.axes.items()]
        points = list(product(*values))
        if choices.budget in panel.one_at_a_time:
            points = list(_cross(points, centre=[along[0] for along in values]))
        return [_point_at(dict(zip(choices.axes, point, strict=True)), panel, label, arm, resolver) for point in points]

    def lacking(self, arms: Sequence[Arm]) -> list[Arm]:
        """Return the points without runs; those that diverged count."""
        return [arm for arm in arms if not (arm.runs or arm.diverged)]

    def kept(self, every: Sequence[Arm]) -> list[Arm]:
        """Return the points at which no run diverged, of the series that have runs at all points."""
        incomplete = {arm.series for arm in self.lacking(every)}
        series = dict.fromkeys(arm.series for arm in every if arm.series not in incomplete)
        kept = [arm for arm in every if arm.series in series and not arm.diverged]
        for name in series:
            if not any(arm.series == name for arm in kept):
                raise NotTestableError(f"{name} diverged at every value")
        return kept

    def draw(self, panel: LoadedPanel) -> Drawing:
        """Draw the loss against each setting, with the optimum."""
        from lightning_sv.experiments.report.grid_plots import grid_plots  # it imports matplotlib

        return grid_plots(panel)


def _cross(points: Sequence[tuple[float, ...]], centre: Sequence[float]) -> Iterator[tuple[float, ...]]:
    """Yield the points that differ from the centre in one axis at most."""
    for point in points:
        moved = sum(value != middle for value, middle in zip(point, centre, strict=True))
        if moved <= 1:
            yield point


def _point_at(keys: Mapping[str, float], panel: PanelSpec, label: str, arm: ArmSpec, resolver: "RunResolver") -> Point:
    settings = (f"{key.rpartition('.')[2]} {value:g}" for key, value in keys.items())
    run_spec = resolver.resolve(panel, arm, panel.model, keys)
    return Point(", ".join([label, *settings]), run_spec, series=label, values=tuple(keys.values()))
