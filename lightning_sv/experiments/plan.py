"""Plans of figures under a budget: the runs of their panels."""

import math
from collections.abc import Iterator, Mapping, Sequence

from lightning_sv.errors import ConfigError, unknown
from lightning_sv.experiments.arms import PlannedArm
from lightning_sv.experiments.claims.claim_types import KINDS as CLAIMS
from lightning_sv.experiments.kinds.base import KINDS, Choices, PlannedPanel
from lightning_sv.experiments.results import PlannedFigure
from lightning_sv.experiments.run_spec import RunResolver
from lightning_sv.experiments.spec import ArmSpec, Axes, Budget, ClaimSpec, FigureSpec, ModelSpec, PanelSpec


def plan_figure(figure: FigureSpec, resolver: RunResolver) -> PlannedFigure:
    """Resolve each arm of a figure, without its runs."""
    for panel in figure.panels:
        if problem := next(_problems(panel), None):
            raise ConfigError(f"{figure.name}: panel {panel.title!r}: {problem}")
    panels = tuple(_plan_panel(panel, resolver, figure.name) for panel in figure.panels)
    ratios = [run_spec.tokens_per_param for panel in panels for run_spec, _ in panel.requests]
    budget = resolver.budget
    return PlannedFigure(
        figure,
        panels,
        tokens_per_param=(min(ratios, default=0.0), max(ratios, default=0.0)),
        budget=budget.name,
        paper_scale=budget.paper_scale or figure.papers_protocol,
    )


def _plan_panel(panel: PanelSpec, resolver: RunResolver, figure: str) -> PlannedPanel:
    choices = _choices(panel, resolver)
    why_not = _why_not(panel, choices, figure)
    if panel.file is not None or why_not is not None:
        return PlannedPanel(panel, why_not=why_not)

    kind = KINDS[panel.kind]
    skipped = _skipped_arms(panel, resolver)
    if not choices.roles:
        return PlannedPanel(panel, skipped=skipped, why_not=_why_no_model(panel, resolver))
    reasons = (resolver.untuned(panel, resolver.budget.models[role]) for role in choices.roles)
    untuned = tuple(dict.fromkeys(filter(None, reasons)))
    if untuned and panel.tuned_as:
        return PlannedPanel(panel, skipped=skipped, why_not=untuned[0])
    if why_not := kind.why_not(choices):
        return PlannedPanel(panel, skipped=skipped, why_not=why_not)

    where = f"{figure}: panel {panel.title!r}"
    arms = _plan_arms(panel, skipped, resolver, choices, where)
    warnings = kind.warnings(panel, choices)
    warnings += [f"{panel.title}: all arms have one learning rate and initial std: {why}." for why in untuned]
    return PlannedPanel(panel, tuple(arms), skipped, warnings=tuple(warnings))


def _skipped_arms(panel: PanelSpec, resolver: RunResolver) -> dict[str, str]:
    """Return the arms that the budget does not train, each with the reason."""
    skipped = {}
    for label, arm in panel.arms.items():
        if why_not := _why_no_arm(arm, panel, resolver):
            skipped[label] = why_not
    return skipped


def _why_no_arm(arm: ArmSpec, panel: PanelSpec, resolver: RunResolver) -> str | None:
    budget = resolver.budget.name
    if budget in arm.skip_under:
        return arm.skip_under[budget]
    if panel.lr is not None and arm.lr is not None and budget not in arm.lr:
        return f"no learning rate of its own is tuned under {budget}"
    model = resolver.model(arm.model) if arm.model else None
    return model if isinstance(model, str) else None


def _choices(panel: PanelSpec, resolver: RunResolver) -> Choices:
    """Return what the budget chooses for a panel."""
    budget = resolver.budget
    roles = [role for role in _roles(panel) if isinstance(resolver.model(role), ModelSpec)]
    axes = {key: by_budget[budget.name] for key, by_budget in panel.axes.items() if budget.name in by_budget}
    return Choices(budget.name, roles, axes, budget.first_seed)


def _roles(panel: PanelSpec) -> list[str]:
    return panel.models or [panel.model]


def _why_not(panel: PanelSpec, choices: Choices, figure: str) -> str | None:
    """Return why the YAML of a figure leaves a panel out under a budget."""
    budget = choices.budget
    if budget in panel.skip_under:
        return panel.skip_under[budget]
    if panel.lr is not None and budget not in panel.lr:
        where_to = f"add one to lr in conf/paper/{figure}.yaml; `lightning-sv sweep` finds it"
        return f"no learning rate is tuned under {budget}; {where_to}"
    return None


def _why_no_model(panel: PanelSpec, resolver: RunResolver) -> str:
    models = [resolver.model(role) for role in _roles(panel)]
    return next(model for model in models if isinstance(model, str))


def _plan_arms(
    panel: PanelSpec, skipped: Mapping[str, str], resolver: RunResolver, choices: Choices, where: str
) -> list[PlannedArm]:
    """Resolve the arms that the budget trains, at all of their points, with their seeds."""
    kind, budget = KINDS[panel.kind], resolver.budget
    specs = {label: spec for label, spec in panel.arms.items() if label not in skipped}
    counts = {label: _seed_count(spec, panel, budget) for label, spec in specs.items()}
    _check_seeds(panel, counts, budget.name, where)

    arms = []
    first = kind.first_seed(choices)
    for label, spec in specs.items():
        seeds = tuple(range(first, first + counts[label]))
        for point in kind.points(panel, label, spec, resolver, choices):
            arm = PlannedArm(
                point.label,
                point.run_spec,
                seeds,
                spec.not_in_paper,
                spec.baseline,
                point.series,
                point.values,
                point.size,
            )
            arms.append(arm)
    _check_different(arms, where)
    return arms


def _seed_count(arm: ArmSpec, panel: PanelSpec, budget: Budget) -> int:
    of_panel = panel.seeds.get(budget.name, budget.seeds)
    return arm.seeds.get(budget.name, of_panel)


def _check_seeds(panel: PanelSpec, counts: Mapping[str, int], budget: str, where: str) -> None:
    """Refuse a claim about an arm with one seed, because one pair has no interval."""
    for claim in panel.claims:
        arms = {claim.a, claim.b or claim.a}
        if budget in claim.skip_under or not arms <= counts.keys():
            continue
        fewest = min(counts[label] for label in arms)
        if fewest < 2:
            hint = f"Increase it, or give its claims `skip_under: {{{budget}: why}}`."
            found = f"{where}: seeds under budget {budget} is {fewest}"
            raise ConfigError(f"{found}; expected two or more to decide a claim. {hint}")


def _check_different(arms: Sequence[PlannedArm], where: str) -> None:
    """Refuse two arms of one configuration."""
    seen: dict[str, str] = {}
    for arm in arms:
        other = seen.setdefault(arm.run_spec.identity, arm.label)
        if other != arm.label:
            same = f"{other!r} and {arm.label!r} resolve to the same configuration"
            raise ConfigError(f"{where}: {same}; expected different arms. Remove one.")


def _problems(panel: PanelSpec) -> Iterator[str]:
    """Yield errors in a panel that do not depend on the budget."""
    if panel.kind not in KINDS:
        yield unknown("kind", panel.kind, list(KINDS))
        return
    kind = KINDS[panel.kind]
    for claim in panel.claims:
        if claim.kind not in CLAIMS:
            yield unknown("claim of kind", claim.kind, list(CLAIMS))
            return
        yield from _claim_problems(claim, panel)
    yield from _unread_fields(panel)
    for label, arm in panel.arms.items():
        if arm.model is not None and not kind.arms_have_models:
            yield f"model of arm {label!r} is {arm.model}; expected none, because the panel has its models."
        yield from _arm_problems(label, arm, panel)
    for by_key in (panel.axes, *(arm.axes for arm in panel.arms.values())):
        yield from _axis_problems(by_key)
    marked = [label for label, arm in panel.arms.items() if arm.baseline]
    if len(marked) > 1:
        yield f"`baseline: true` is set for {' and '.join(marked)}; expected one arm."
    yield from kind.problems(panel)


def _unread_fields(panel: PanelSpec) -> Iterator[str]:
    """Yield errors: fields that some kinds read, and that of the panel does not."""
    readers: dict[str, list[str]] = {}
    for name, kind in KINDS.items():
        for field in kind.fields:
            readers.setdefault(field, []).append(name)
    for field, names in readers.items():
        value = getattr(panel, field)
        if value and panel.kind not in names:
            found = f"{field} is set and kind is {panel.kind!r}"
            yield f"{found}; expected kind {' or '.join(names)}. Remove {field}, or change kind."


def _claim_problems(claim: ClaimSpec, panel: PanelSpec) -> Iterator[str]:
    name, claim_type = f"claim {claim.kind!r}", CLAIMS[claim.kind]
    if claim.kind not in KINDS[panel.kind].claims:
        kinds = " or ".join(other for other, kind in KINDS.items() if claim.kind in kind.claims)
        yield f"kind is {panel.kind!r}; expected {kinds}, because it has a {name}."
    labels = [claim.a, claim.b] if "{b}" in claim_type.statement else [claim.a]
    for label in labels:
        if label not in panel.arms:
            yield unknown(f"{name}: arm", label, list(panel.arms))
    if len(set(labels)) < len(labels):
        yield f"a and b of {name} are both {claim.a!r}; expected two arms."
    for key, share in (("at", claim.at), ("until", claim.until)):
        if not 0 < share <= 1:
            yield f"{name}: {key} is {share:g}; expected a share of the tokens, above 0 and at most 1."
    if "{at" in claim_type.statement and claim.at >= claim.until:
        yield f"{name}: at is {claim.at:g}; expected less than until, which is {claim.until:g}."
    takes_margin = "margin" in claim_type.statement or "{more}" in claim_type.statement
    if claim.margin and not takes_margin:
        yield f"margin of a {name} is {claim.margin:g}; expected none."
    if lacking := claim_type.needs(claim, panel):
        yield f"a {name} needs {lacking}."


def _arm_problems(label: str, arm: ArmSpec, panel: PanelSpec) -> Iterator[str]:
    keys = {*panel.overrides, *arm.overrides, *panel.axes}
    if (panel.lr or arm.lr) and "model.optim.lr" in keys:
        yield f"lr of arm {label!r} is set; expected none, because model.optim.lr is set too. Remove one."
    if "model.tokens_per_param" in arm.overrides and "trainer.max_steps" not in arm.overrides:
        yield f"model.tokens_per_param of arm {label!r} is set; expected none. Set 'longer' or trainer.max_steps."
    if arm.longer != 1 and "trainer.max_steps" in arm.overrides:
        yield f"longer of arm {label!r} is {arm.longer:g}; expected none, because its trainer.max_steps is set."
    for key in arm.axes.keys() - panel.axes.keys():
        yield f"axes of arm {label!r} is {key}; expected an axis of the panel. Set a single value in 'overrides'."


def _axis_problems(axes: Axes) -> Iterator[str]:
    for key, by_budget in axes.items():
        for values in by_budget.values():
            is_positive = all(0 < value < math.inf for value in values)
            if not is_positive or len(set(values)) < len(values):
                yield f"axis {key} is {values}; expected different positive numbers, for a fit over their logarithms."
