"""A figure under a budget: the runs of its panels, and the further runs that a rule asks for once some are known."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from lightning_sv.analysis.grids import optimum, pairs_needed
from lightning_sv.experiments.claims.table import check_claims
from lightning_sv.experiments.recipe import Recipe
from lightning_sv.experiments.results import Arm, Figure, Panel, RuleOutcome, Series
from lightning_sv.experiments.runs import Runs
from lightning_sv.experiments.spec import FigureSpec, ModelSpec, PanelSpec

if TYPE_CHECKING:  # torch with it, and `report` plans nothing
    from lightning_sv.experiments.recipes import Recipes


def plan_figure(figure: FigureSpec, recipes: "Recipes") -> Figure:
    """Settle every arm of a figure.

    Raises:
        ValueError: an arm that `fit` would refuse, a model that the budget does not know, two arms alike, or a claim
            that they cannot decide
    """
    for panel in figure.panels:
        check_claims(panel, f"{figure.name}: panel {panel.title!r}")
    panels = tuple(_plan_panel(panel, recipes, figure.name) for panel in figure.panels)
    budgets = [recipe.tokens_per_param for panel in panels for arm in panel.arms for recipe, _ in arm.wanted[:1]]
    budget = recipes.budget
    return Figure(
        figure, panels, tokens_per_param=min(budgets, default=0.0), budget=budget.name, papers_own=budget.papers_own
    )


def _plan_panel(panel: PanelSpec, recipes: "Recipes", figure: str) -> Panel:
    budget = recipes.budget.name
    roles = panel.models or [panel.model]
    models = {role: recipes.model(role) for role in roles}
    here = [role for role, model in models.items() if isinstance(model, ModelSpec)]
    values = panel.values.get(budget, []) if panel.kind == "grid" else []
    why_not = panel.not_at.get(budget)
    if panel.file is not None or why_not is not None:
        return Panel(panel, why_not=why_not)
    if not here:
        return Panel(panel, why_not=next(model for model in models.values() if isinstance(model, str)))
    if panel.kind == "grid" and not values:
        return Panel(panel, why_not="no grid is given for it")
    seeds = tuple(range(panel.seeds.get(budget, recipes.budget.seeds)))
    arms, series = [], []
    for label, spec in panel.arms.items():
        points: dict[str, Recipe] = {}
        axis = tuple(spec.values.get(budget, values))
        if panel.kind == "scaling":
            made = [recipes.make(panel, spec, role) for role in here]
            points = {f"{label}, {recipe.model}": recipe for recipe in made}
        elif panel.kind == "grid":
            tail = panel.axis.rpartition(".")[2]
            points = {f"{label}, {tail} {x:g}": recipes.make(panel, spec, panel.model, {panel.axis: x}) for x in axis}
        else:
            points = {label: recipes.make(panel, spec, spec.model or panel.model)}
        arms += [Arm(name, (), spec.ours, spec.baseline, recipe, seeds) for name, recipe in points.items()]
        along = axis or tuple(recipe.parameters for recipe in points.values())
        sizes = tuple(recipe.model for recipe in points.values())
        series.append(Series(label, spec.ours, spec.baseline, tuple(points), along, sizes))
    _check_different(arms, f"{figure}: panel {panel.title!r}")
    few = panel.kind == "scaling" and len(here) < 4
    warnings = (f"{panel.title}: {len(here)} sizes; a slope wants four or more.",) if few else ()
    return Panel(panel, tuple(arms), tuple(series) if panel.kind in ("scaling", "grid") else (), warnings=warnings)


def _check_different(arms: list[Arm], where: str) -> None:
    seen: dict[str, str] = {}
    for arm in arms:
        other = seen.setdefault(arm.recipe.identity, arm.label) if arm.recipe else arm.label
        if other != arm.label:
            raise ValueError(f"{where}: {other!r} and {arm.label!r} come to the same runs; leave one out.")


def with_pairs(panels: Iterable[Panel], runs: Runs) -> list[Panel]:
    """The panels of a figure, each grid with a rule followed by the panel that the rule asks for, see `pairs_of`."""
    return [each for panel in panels for each in ([panel, pairs_of(panel, runs)] if panel.spec.rule else [panel])]


def pairs_of(panel: Panel, runs: Runs) -> Panel:
    """What the rule of a grid asks for: nothing before the grid, then the pilot, then the pairs it needs.

    Each arm at its best value, on seeds that the grid has not used; without arms where they cannot be had yet.

    Args:
        panel: a grid of two arms with a rule
        runs: those that are there
    """
    rule = panel.spec.rule
    assert rule is not None
    panel = runs.without_diverged(panel)
    none = replace(panel, arms=(), series=(), outcome=RuleOutcome(), warnings=())
    if not panel.arms:
        return none
    best: list[Arm] = []
    ends: list[str] = []
    first = len(panel.arms[0].seeds)
    for series in panel.series:
        of = [panel.arm(name) for name in series.arms]
        losses = [[runs.loss(*run) for run in arm.wanted] for arm in of]
        means = [float(np.mean([x for x in row if x is not None])) for row in losses if None not in row]
        if len(means) < len(of):
            arms, left_out = runs.complete(panel.arms)
            return replace(none, why_not="its pairs were not trained" if arms else left_out)
        found = optimum(series.values, means)
        best.append(replace(of[found.at], label=series.label))
        ends += [series.label] * math.isinf(found.error)

    def at(pairs: int, needed: int | None = None) -> Panel:
        seeds = tuple(range(first, first + pairs))
        arms = tuple(replace(arm, seeds=seeds) for arm in best)
        return replace(none, arms=arms, outcome=RuleOutcome(needed, tuple(ends)))

    pilot = at(rule.pilot)
    a, b = ([runs.loss(*run) for run in arm.wanted] for arm in pilot.arms)
    differences = [x - y for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    if len(differences) < rule.pilot:
        return pilot
    needed = pairs_needed(float(np.std(differences, ddof=1)), rule.margin)
    within = needed is not None and needed <= rule.budget
    return at(max(rule.pilot, needed) if within and needed is not None else rule.pilot, needed)
