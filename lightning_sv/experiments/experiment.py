"""A figure under a budget: the runs of its panels, and the further runs that a rule asks for once some are known."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_sv.analysis.grids import optimum, pairs_needed
from lightning_sv.experiments.claims import check_claims
from lightning_sv.experiments.recipe import Recipe, Recipes
from lightning_sv.experiments.spec import ArmSpec, FigureSpec, ModelSpec, PanelSpec

#: loss of a finished run, nats per token; None where it is not finished
Loss = Callable[[Recipe, int], float | None]


@dataclass(frozen=True)
class ArmRuns:
    """One arm of a panel: what is trained, on which seeds."""

    label: str
    recipe: Recipe
    seeds: tuple[int, ...]
    ours: bool
    baseline: bool

    @property
    def runs(self) -> list[tuple[Recipe, int]]:
        """Its runs."""
        return [(self.recipe, seed) for seed in self.seeds]


@dataclass(frozen=True)
class PlannedPanel:
    """A panel with its arms settled.

    Args:
        spec: As in the YAML.
        arms: In its order; none where the panel cannot be had on this budget.
        why_not: The reason then.
        series: Of a grid or a scaling panel, see `PanelResult`; ``values``, ``sizes``, ``arms`` in one order.
        warnings: What weakens it.
    """

    spec: PanelSpec
    arms: tuple[ArmRuns, ...] = ()
    why_not: str | None = None
    series: tuple[dict[str, Any], ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Question:
    """The two arms of a rule, each at its best value, on seeds that the grid has not used.

    Args:
        arms: With the seeds that are wanted so far.
        needed: Pairs for the margin, from the pilot's spread; None before the pilot, or where no number would do.
        ends: Arms whose best value is an end of the grid: it may not be their best.
    """

    arms: tuple[ArmRuns, ...]
    needed: int | None = None
    ends: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedFigure:
    """A figure with its panels settled."""

    spec: FigureSpec
    panels: tuple[PlannedPanel, ...] = field(default=())

    def runs(self) -> list[tuple[Recipe, int]]:
        """Every run that is known beforehand, seed by seed, so that a stop leaves whole pairs."""
        return by_seed(run for panel in self.panels for arm in panel.arms for run in arm.runs)


def by_seed(runs: Iterable[tuple[Recipe, int]]) -> list[tuple[Recipe, int]]:
    """Each run once, in order of the seeds."""
    unique = {recipe.key(seed): (recipe, seed) for recipe, seed in runs}
    return sorted(unique.values(), key=lambda run: run[1])


def plan_figure(figure: FigureSpec, recipes: Recipes) -> PlannedFigure:
    """Settle every arm of a figure.

    Raises:
        ValueError: An arm that `fit` would refuse, a model that the budget does not know, two arms alike, or a claim
            that they cannot decide.
    """
    for panel in figure.panels:
        check_claims(panel, f"{figure.name}: panel {panel.title!r}")
    return PlannedFigure(figure, tuple(_plan_panel(panel, recipes, figure.name) for panel in figure.panels))


def _plan_panel(panel: PanelSpec, recipes: Recipes, figure: str) -> PlannedPanel:
    budget = recipes.budget
    why_not = panel.not_at.get(budget.name)
    roles = panel.models or [panel.model]
    here = [role for role in roles if isinstance(recipes.model(role), ModelSpec)]
    if panel.file is not None or why_not is not None:
        return PlannedPanel(panel, why_not=why_not)
    if not here:
        lacking = next(why for role in roles if isinstance(why := recipes.model(role), str))
        return PlannedPanel(panel, why_not=lacking)
    values = panel.values.get(budget.name, []) if panel.kind == "grid" else []
    if panel.kind == "grid" and not values:
        return PlannedPanel(panel, why_not="no grid is given for it")
    seeds = tuple(range(panel.seeds.get(budget.name, budget.seeds)))
    arms, series = [], []
    for label, arm in panel.arms.items():
        of: list[ArmRuns] = []
        if panel.kind == "scaling":
            for role in here:
                recipe = recipes.make(panel, arm, role)
                of.append(ArmRuns(f"{label}, {recipe.model}", recipe, seeds, arm.ours, arm.baseline))
        elif panel.kind == "grid":
            tail = panel.axis.rpartition(".")[2]
            for value in arm.values.get(budget.name, values):
                recipe = recipes.make(panel, arm, panel.model, {panel.axis: value})
                of.append(ArmRuns(f"{label}, {tail} {value:g}", recipe, seeds, arm.ours, arm.baseline))
        else:
            of = [ArmRuns(label, recipes.make(panel, arm, arm.model or panel.model), seeds, arm.ours, arm.baseline)]
        arms += of
        series.append(_series(label, arm, panel, of, arm.values.get(budget.name, values)))
    _refuse_equal(arms, f"{figure}: panel {panel.title!r}")
    few = panel.kind == "scaling" and len(here) < 4
    warnings = (f"{panel.title}: {len(here)} sizes; a slope wants four or more.",) if few else ()
    kinds = ("scaling", "grid")
    return PlannedPanel(panel, tuple(arms), None, tuple(series) if panel.kind in kinds else (), warnings)


def _series(label: str, arm: ArmSpec, panel: PanelSpec, of: list[ArmRuns], values: list[float]) -> dict[str, Any]:
    made: dict[str, Any] = {"label": label, "ours": arm.ours, "baseline": arm.baseline, "arms": [a.label for a in of]}
    if panel.kind == "grid":
        return made | {"values": list(values)}
    return made | {"sizes": [a.recipe.model for a in of], "parameters": [a.recipe.parameters for a in of]}


def _refuse_equal(arms: list[ArmRuns], where: str) -> None:
    seen: dict[str, str] = {}
    for arm in arms:
        other = seen.setdefault(arm.recipe.identity, arm.label)
        if other != arm.label:
            raise ValueError(f"{where}: {other!r} and {arm.label!r} come to the same runs; leave one out.")


def question(panel: PlannedPanel, loss: Loss) -> Question | None:
    """What the rule of a panel asks for: nothing before its grid, then the pilot, then the pairs it needs.

    Args:
        panel: A grid of two arms with a rule.
        loss: Of the runs so far.
    """
    rule = panel.spec.rule
    assert rule is not None
    best: list[ArmRuns] = []
    ends: list[str] = []
    first = len(panel.arms[0].seeds)
    for series in panel.series:
        of = [next(arm for arm in panel.arms if arm.label == name) for name in series["arms"]]
        losses = [[loss(*run) for run in arm.runs] for arm in of]
        means = [float(np.mean([x for x in row if x is not None])) for row in losses if None not in row]
        if len(means) < len(of):
            return None
        found = optimum(series["values"], means)
        best.append(of[found.at])
        ends += [series["label"]] * math.isinf(found.error)

    def at(pairs: int, needed: int | None = None) -> Question:
        seeds = tuple(range(first, first + pairs))
        arms = zip(best, panel.series, strict=True)
        return Question(
            tuple(ArmRuns(s["label"], a.recipe, seeds, s["ours"], s["baseline"]) for a, s in arms), needed, tuple(ends)
        )

    pilot = at(rule.pilot)
    a, b = ([loss(*run) for run in arm.runs] for arm in pilot.arms)
    differences = [x - y for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    if len(differences) < rule.pilot:
        return pilot
    needed = pairs_needed(float(np.std(differences, ddof=1)), rule.margin)
    within = needed is not None and needed <= rule.budget
    return at(max(rule.pilot, needed) if within and needed is not None else rule.pilot, needed)
