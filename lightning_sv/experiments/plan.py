"""Plan a figure under a budget: which runs its panels need."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from scipy.special import ndtri

from lightning_sv.analysis.verdicts import CONFIDENCE, pairs_within
from lightning_sv.errors import ConfigError, unknown
from lightning_sv.experiments.claims.claim_types import KINDS
from lightning_sv.experiments.results import Arm, Figure, Panel, Series
from lightning_sv.experiments.run_spec import RunResolver, RunSpec
from lightning_sv.experiments.spec import ArmSpec, Budget, ClaimSpec, FigureSpec, ModelSpec, PanelSpec

#: grids are trained on seeds from here on, which judge nothing: what is best by luck there has no luck elsewhere
TUNING_SEED = 100


def plan_figure(figure: FigureSpec, resolver: RunResolver) -> Figure:
    """Settle every arm of a figure; its runs are not read yet.

    Raises:
        ConfigError: an arm that `fit` would refuse, a model that the budget does not know, two arms alike, or a claim
            that they cannot decide
    """
    for panel in figure.panels:
        if problem := next(_problems(panel), None):
            raise ConfigError(f"{figure.name}: panel {panel.title!r}: {problem}")
    panels = tuple(_plan_panel(panel, resolver, figure.name) for panel in figure.panels)
    ratios = [arm.run_spec.tokens_per_param for panel in panels for arm in panel.arms if arm.run_spec]
    return Figure(
        figure,
        panels,
        tokens_per_param=(min(ratios, default=0.0), max(ratios, default=0.0)),
        budget=resolver.budget.name,
        paper_scale=resolver.budget.paper_scale or figure.papers_protocol,
    )


def _plan_panel(panel: PanelSpec, resolver: RunResolver, figure: str) -> Panel:
    budget, where = resolver.budget.name, f"{figure}: panel {panel.title!r}"
    models = {role: resolver.model(role) for role in panel.models or [panel.model]}
    here = [role for role, model in models.items() if isinstance(model, ModelSpec)]
    axes = {key: of[budget] for key, of in panel.axes.items() if budget in of}
    why_not = panel.skip_under.get(budget)
    if why_not is None and panel.lr is not None and budget not in panel.lr:
        why_not = f"no learning rate is tuned for it under {budget}; add one to lr in conf/paper/{figure}.yaml"
    if panel.file is not None or why_not is not None:
        return Panel(panel, why_not=why_not)
    if panel.kind not in ("grid", "scaling", "lengths"):  # whose arms all train the models of the panel
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
    if len(seeds) < 2 and _claims_at(panel, resolver.budget):  # one pair decides nothing, whatever it ends at
        raise ConfigError(
            f"{where}: budget {budget} trains {len(seeds)} {'pair' if len(seeds) == 1 else 'pairs'} for it, too few to "
            f"decide a claim; give it two or more, or its claims `skip_under: {{{budget}: why}}`."
        )
    arms, series = list[Arm](), list[Series]()
    for label, spec in panel.arms.items():
        if budget not in spec.skip_under:
            points, of = _points(panel, label, spec, resolver, here, axes)
            arms += [Arm(name, (), spec.not_in_paper, spec.baseline, made, seeds) for name, made in points.items()]
            series += [of] if of.sizes or of.points else []
    seen: dict[str, str] = {}
    for arm in arms:
        assert arm.run_spec is not None
        other = seen.setdefault(arm.run_spec.identity, arm.label)
        if other != arm.label:
            raise ConfigError(f"{where}: {other!r} and {arm.label!r} come to the same runs; leave one out.")
    few = panel.kind == "scaling" and len(here) < 4
    warnings = [f"{panel.title}: {len(here)} sizes; a slope wants four or more."] * few
    warnings += [f"{panel.title}: all arms have one learning rate and initial std: {why}." for why in untuned]
    warnings += [words for role in here for words in _beyond_reach(panel, resolver.budget, role, len(seeds))]
    return Panel(panel, tuple(arms), tuple(series), warnings=tuple(warnings))


def _points(
    panel: PanelSpec, label: str, arm: ArmSpec, resolver: RunResolver, here: list[str], axes: dict[str, list[float]]
) -> tuple[dict[str, RunSpec], Series]:
    """What is trained of an arm, by the labels of its points: sizes, lengths, values of a grid, or the arm alone."""
    of = Series(label, arm.not_in_paper, arm.baseline, ())
    if panel.kind == "grid":
        along = [arm.axes.get(key, {}).get(resolver.budget.name, values) for key, values in axes.items()]
        grid = tuple(product(*along))
        if resolver.budget.name in panel.one_at_a_time:  # points that differ from the first values along one axis
            centre = [values[0] for values in along]
            grid = tuple(p for p in grid if sum(x != c for x, c in zip(p, centre, strict=True)) <= 1)
        keys = [dict(zip(axes, point, strict=True)) for point in grid]
        names = [", ".join([label, *(f"{k.rpartition('.')[2]} {v:g}" for k, v in each.items())]) for each in keys]
        made = [resolver.resolve(panel, arm, panel.model, each) for each in keys]
        of = replace(of, arms=tuple(names), points=grid)
    elif panel.kind in ("scaling", "lengths"):
        by_size, made = panel.kind == "scaling", [resolver.resolve(panel, arm, role) for role in here]
        sizes = [run_spec.model for run_spec in made] if by_size else _lengths(panel, resolver, here)
        names = [f"{label}, {size}" for size in sizes]
        values = tuple(run_spec.parameters if by_size else run_spec.tokens_per_param for run_spec in made)
        of = replace(of, arms=tuple(names), values=values, sizes=tuple(sizes))
    else:
        names, made = [label], [resolver.resolve(panel, arm, arm.model or panel.model)]
    return dict(zip(names, made, strict=True)), of


def _here(arm: ArmSpec, panel: PanelSpec, resolver: RunResolver) -> ArmSpec:
    """Skip an arm whose own model or learning rate the budget lacks."""
    budget = resolver.budget.name
    why_not = resolver.model(arm.model) if arm.model else None
    if panel.lr is not None and arm.lr is not None and budget not in arm.lr:
        why_not = f"no learning rate of its own is tuned under {budget}"
    return replace(arm, skip_under={budget: why_not} | arm.skip_under) if isinstance(why_not, str) else arm


def _lengths(panel: PanelSpec, resolver: RunResolver, roles: list[str]) -> list[str]:
    """Return the baseline's tokens per parameter; arms with more vectors have 1% fewer."""
    (baseline,) = (arm for arm in panel.arms.values() if arm.baseline)
    return [f"{resolver.resolve(panel, baseline, role).tokens_per_param:.3g} tokens a parameter" for role in roles]


def _problems(panel: PanelSpec) -> Iterator[str]:
    """What a panel of a YAML cannot have, whatever the budget."""
    for claim in panel.claims:
        name = f"claim {claim.kind!r}"
        if (kind := KINDS.get(claim.kind)) is None:
            yield unknown("claim of kind", claim.kind, list(KINDS))
            return
        if panel.kind not in kind.panels:
            yield f"a {name} needs a panel of kind {' or '.join(kind.panels)}, this one is {panel.kind!r}."
        labels = [claim.a, claim.b] if "{b}" in kind.statement else [claim.a]
        yield from (unknown(f"{name}: arm", label, list(panel.arms)) for label in labels if label not in panel.arms)
        if len(set(labels)) < len(labels):
            yield f"{name} compares {claim.a!r} with itself; a and b are two arms."
        for key, share in (("at", claim.at), ("until", claim.until)):
            if not 0 < share <= 1:
                yield f"{name}: {key} is {share:g}; a share of the tokens is over 0 and up to 1."
        if lacking := kind.needs(claim, panel):
            yield f"a {name} needs {lacking}."
    if (panel.kind == "scalar") != bool(panel.tag):
        says = f"its tag is {panel.tag!r}" if panel.tag else "it names no tag"
        yield (
            f"{says} and its kind is {panel.kind!r}; the kind 'scalar' and a tag, e.g. sharpness/all/lambda_max, go "
            "together."
        )
    for label, arm in panel.arms.items():
        for key in arm.axes.keys() - panel.axes.keys():
            yield (
                f"arm {label!r} has values of {key}, which the panel does not vary; set the key of one run under "
                "'overrides'."
            )
    marked = [label for label, arm in panel.arms.items() if arm.baseline]
    if len(marked) > 1:
        yield f"{' and '.join(marked)} are all `baseline: true`; leave it at one arm."
    if panel.kind in ("scaling", "lengths") and not marked:  # drawn as differences alone
        yield "no arm is `baseline: true`; set it at the one that the others are compared with."


def _beyond_reach(panel: PanelSpec, budget: Budget, role: str, pairs: int) -> list[str]:
    """A sentence on claims of equality that the pairs of a budget could not show, by the known scatter of its runs."""
    model = budget.models[role]
    spread = math.sqrt(2) * model.residual_std
    asked = [claim for claim in _claims_at(panel, budget) if claim.kind == "equal"]
    if not spread or not asked or (panel.optim, panel.schedule) != (PanelSpec.optim, PanelSpec.schedule):
        return []
    margin = min(claim.margin for claim in asked)
    if float(ndtri((1 + CONFIDENCE) / 2)) * spread / math.sqrt(pairs) < margin:
        return []
    return [
        f"{panel.title}: {pairs} pairs of runs that scatter as those of {model.config} did "
        f"({model.residual_std:g}) are not expected to show an equality within {margin:g}, only its opposite: "
        f"where arms are equal {math.ceil(pairs_within(spread, CONFIDENCE, margin))} pairs show it in 8 of 10 cases."
    ]


def _claims_at(panel: PanelSpec, budget: Budget) -> list[ClaimSpec]:
    """Those that the runs of a budget are to decide."""
    trained = {label for label, arm in panel.arms.items() if budget.name not in arm.skip_under}
    return [c for c in panel.claims if budget.name not in c.skip_under and {c.a, c.b or c.a} <= trained]
