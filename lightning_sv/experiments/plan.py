"""Plans of figures under a budget: the runs of their panels."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from lightning_sv.errors import ConfigError, expect, unknown
from lightning_sv.experiments.claims.claim_types import KINDS
from lightning_sv.experiments.results import Arm, Figure, Panel
from lightning_sv.experiments.run_spec import RunResolver
from lightning_sv.experiments.spec import ArmSpec, FigureSpec, ModelSpec, PanelSpec

#: first seed of grids; comparisons at tuned values do not use these seeds, so that the selection does not bias them
TUNING_SEED = 100


def plan_figure(figure: FigureSpec, resolver: RunResolver) -> Figure:
    """Resolve each arm of a figure, without its runs."""
    for panel in figure.panels:
        if problem := next(_problems(panel), None):
            raise ConfigError(f"{figure.name}: panel {panel.title!r}: {problem}")
    panels = tuple(_plan_panel(panel, resolver, figure.name) for panel in figure.panels)
    ratios = [arm.run_spec.tokens_per_param for panel in panels for arm in panel.arms if arm.run_spec]
    ends, budget = (min(ratios, default=0.0), max(ratios, default=0.0)), resolver.budget
    paper_scale = budget.paper_scale or figure.papers_protocol
    return Figure(figure, panels, tokens_per_param=ends, budget=budget.name, paper_scale=paper_scale)


def _plan_panel(panel: PanelSpec, resolver: RunResolver, figure: str) -> Panel:
    budget, where = resolver.budget.name, f"{figure}: panel {panel.title!r}"
    models = {role: resolver.model(role) for role in panel.models or [panel.model]}
    here = [role for role, model in models.items() if isinstance(model, ModelSpec)]
    axes = {key: by_budget[budget] for key, by_budget in panel.axes.items() if budget in by_budget}
    why_not = panel.skip_under.get(budget)
    if why_not is None and panel.lr is not None and budget not in panel.lr:
        where_to = f"add one to lr in conf/paper/{figure}.yaml; `lightning-sv sweep` finds it"
        why_not = f"no learning rate is tuned under {budget}; {where_to}"
    if panel.file is not None or why_not is not None:
        return Panel(panel, why_not=why_not)
    if panel.kind not in ("grid", "scaling", "lengths"):  # arms of these kinds have the models of the panel
        panel = replace(panel, arms={label: _here(arm, panel, resolver) for label, arm in panel.arms.items()})
    if not here:
        return Panel(panel, why_not=next(model for model in models.values() if isinstance(model, str)))
    reasons = (resolver.untuned(panel, resolver.budget.models[role]) for role in here)
    untuned = tuple(dict.fromkeys(filter(None, reasons)))
    if untuned and panel.tuned_as:
        return Panel(panel, why_not=untuned[0])
    if panel.kind == "grid" and not axes:
        return Panel(panel, why_not="no grid is given for it")
    first = TUNING_SEED if panel.kind == "grid" else resolver.budget.first_seed
    seeds = tuple(range(first, first + panel.seeds.get(budget, resolver.budget.seeds)))
    given = {label: spec for label, spec in panel.arms.items() if budget not in spec.skip_under}
    decided = [c for c in panel.claims if budget not in c.skip_under and {c.a, c.b or c.a} <= given.keys()]
    enough = len(seeds) > 1 or not decided
    hint = f"Increase it, or give its claims `skip_under: {{{budget}: why}}`."
    expect(enough, f"{where}: seeds under budget {budget}", len(seeds), f"two or more to decide a claim. {hint}")
    arms = [
        replace(arm, ours=spec.not_in_paper, baseline=spec.baseline, seeds=seeds)
        for label, spec in given.items()
        for arm in _points(panel, label, spec, resolver, here, axes)
    ]
    seen: dict[str, str] = {}
    for arm in arms:
        assert arm.run_spec is not None
        other = seen.setdefault(arm.run_spec.identity, arm.label)
        if other != arm.label:
            same = f"{other!r} and {arm.label!r} resolve to the same configuration"
            raise ConfigError(f"{where}: {same}; expected different arms. Remove one.")
    few = panel.kind == "scaling" and len(here) < 4
    warnings = [f"{panel.title}: {len(here)} sizes; a slope needs four or more."] * few
    warnings += [f"{panel.title}: all arms have one learning rate and initial std: {why}." for why in untuned]
    return Panel(panel, tuple(arms), warnings=tuple(warnings))


def _points(
    panel: PanelSpec, label: str, arm: ArmSpec, resolver: RunResolver, here: list[str], axes: dict[str, list[float]]
) -> list[Arm]:
    """Resolve an arm: at the values of a grid, at sizes or lengths, or alone."""
    if panel.kind == "grid":
        along = [arm.axes.get(key, {}).get(resolver.budget.name, values) for key, values in axes.items()]
        grid = list(product(*along))
        if resolver.budget.name in panel.one_at_a_time:  # at most one axis differs from its first value
            centre = [values[0] for values in along]
            grid = [p for p in grid if sum(x != c for x, c in zip(p, centre, strict=True)) <= 1]
        arms = []
        for point in grid:
            keys = dict(zip(axes, point, strict=True))
            name = ", ".join([label, *(f"{key.rpartition('.')[2]} {value:g}" for key, value in keys.items())])
            run_spec = resolver.resolve(panel, arm, panel.model, keys)
            arms.append(Arm(name, run_spec=run_spec, series=label, point=point))
        return arms
    if panel.kind not in ("scaling", "lengths"):
        return [Arm(label, run_spec=resolver.resolve(panel, arm, arm.model or panel.model))]
    made = [resolver.resolve(panel, arm, role) for role in here]
    by_size = panel.kind == "scaling"
    sizes = [run_spec.model for run_spec in made] if by_size else _lengths(panel, resolver, here)
    wanted = f"different ones. Set {'model.backbone.name' if by_size else 'the steps'} of each model of the budget."
    expect(len({*sizes}) == len(sizes), f"panel {panel.title!r}: its {panel.kind}", ", ".join(sizes), wanted)
    return [
        Arm(f"{label}, {size}", run_spec=run_spec, series=label, point=(value,), size=size)
        for run_spec, size in zip(made, sizes, strict=True)
        for value in [run_spec.parameters if by_size else run_spec.tokens_per_param]
    ]


def _here(arm: ArmSpec, panel: PanelSpec, resolver: RunResolver) -> ArmSpec:
    """Skip an arm whose own model or learning rate the budget lacks."""
    budget = resolver.budget.name
    why_not = resolver.model(arm.model) if arm.model else None
    if panel.lr is not None and arm.lr is not None and budget not in arm.lr:
        why_not = f"no learning rate of its own is tuned under {budget}"
    return replace(arm, skip_under={budget: why_not} | arm.skip_under) if isinstance(why_not, str) else arm


def _lengths(panel: PanelSpec, resolver: RunResolver, roles: list[str]) -> list[str]:
    """Return the tokens per parameter of the baseline; arms with more vectors have 1% fewer."""
    (baseline,) = (arm for arm in panel.arms.values() if arm.baseline)
    return [f"{resolver.resolve(panel, baseline, role).tokens_per_param:.3g} tokens a parameter" for role in roles]


def _problems(panel: PanelSpec) -> Iterator[str]:
    """Yield errors in a panel that do not depend on the budget."""
    for claim in panel.claims:
        name = f"claim {claim.kind!r}"
        if (kind := KINDS.get(claim.kind)) is None:
            yield unknown("claim of kind", claim.kind, list(KINDS))
            return
        if panel.kind not in kind.panels:
            yield f"kind is {panel.kind!r}; expected {' or '.join(kind.panels)}, because it has a {name}."
        labels = [claim.a, claim.b] if "{b}" in kind.statement else [claim.a]
        yield from (unknown(f"{name}: arm", label, list(panel.arms)) for label in labels if label not in panel.arms)
        if len(set(labels)) < len(labels):
            yield f"a and b of {name} are both {claim.a!r}; expected two arms."
        for key, share in (("at", claim.at), ("until", claim.until)):
            if not 0 < share <= 1:
                yield f"{name}: {key} is {share:g}; expected a share of the tokens, above 0 and at most 1."
        if "{at" in kind.statement and claim.at >= claim.until:
            yield f"{name}: at is {claim.at:g}; expected less than until, which is {claim.until:g}."
        if claim.margin and "margin" not in kind.statement and "{more}" not in kind.statement:
            yield f"margin of a {name} is {claim.margin:g}; expected none."
        if lacking := kind.needs(claim, panel):
            yield f"a {name} needs {lacking}."
    by_size = panel.kind in ("scaling", "lengths")
    for key, kinds in (("axes", "grid"), ("one_at_a_time", "grid"), ("models", "scaling or lengths")):
        if getattr(panel, key) and panel.kind not in kinds:
            yield f"{key} is set and kind is {panel.kind!r}; expected kind {kinds}. Remove {key}, or change kind."
    for label, arm in panel.arms.items():
        if arm.model is not None and (by_size or panel.kind == "grid"):
            yield f"model of arm {label!r} is {arm.model}; expected none, because the panel has its models."
        given = {*panel.overrides, *arm.overrides, *panel.axes}
        if (panel.lr or arm.lr) and "model.optim.lr" in given:
            yield f"lr of arm {label!r} is set; expected none, because model.optim.lr is set too. Remove one."
        if "model.tokens_per_param" in arm.overrides and "trainer.max_steps" not in arm.overrides:
            yield f"model.tokens_per_param of arm {label!r} is set; expected none. Set 'longer' or trainer.max_steps."
        if arm.longer != 1 and "trainer.max_steps" in arm.overrides:
            yield f"longer of arm {label!r} is {arm.longer:g}; expected none, because its trainer.max_steps is set."
    for by_key in (panel.axes, *(arm.axes for arm in panel.arms.values())):
        for key, values in ((key, values) for key, by_budget in by_key.items() for values in by_budget.values()):
            if not all(0 < value < math.inf for value in values) or len(set(values)) < len(values):
                yield f"axis {key} is {values}; expected different positive numbers, for a fit over their logarithms."
    for key in panel.axes.keys() & {"model.tokens_per_param", "trainer.max_steps"}:
        yield f"axes has {key}; expected other keys, because all points have the same steps. Use kind 'lengths'."
    if (panel.kind == "scalar") != bool(panel.tag):
        expected = "a tag, e.g. sharpness/all/lambda_max" if panel.kind == "scalar" else "kind 'scalar' or no tag"
        yield f"tag is {panel.tag!r} and kind is {panel.kind!r}; expected {expected}."
    for label, arm in panel.arms.items():
        for key in arm.axes.keys() - panel.axes.keys():
            yield f"axes of arm {label!r} is {key}; expected an axis of the panel. Set a single value in 'overrides'."
    marked = [label for label, arm in panel.arms.items() if arm.baseline]
    if len(marked) > 1:
        yield f"`baseline: true` is set for {' and '.join(marked)}; expected one arm."
    if by_size and not marked:  # only differences are drawn
        yield "`baseline: true` is set for no arm; expected one arm."
