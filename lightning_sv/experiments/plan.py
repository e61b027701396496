"""Plans of figures under a budget: the runs of their panels."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_sv.errors import ConfigError
from lightning_sv.experiments.arms import PlannedArm
from lightning_sv.experiments.kinds.base import KINDS, Choices, PlannedPanel
from lightning_sv.experiments.panel_errors import panel_errors
from lightning_sv.experiments.resolver import RunResolver
from lightning_sv.experiments.results import PlannedFigure
from lightning_sv.experiments.spec import ArmSpec, Budget, FigureSpec, PanelSpec


def plan_figure(figure: FigureSpec, resolver: RunResolver) -> PlannedFigure:
    """Resolve each arm of a figure, without its runs.

    Raises:
        ConfigError: names the figure, the panel and the key that is wrong
    """
    for panel in figure.panels:
        for error in panel_errors(panel):
            raise ConfigError(f"{figure.name}: panel {panel.title!r}: {error}")
    panels = [_plan_panel(panel, resolver, figure.name) for panel in figure.panels]
    budget = resolver.budget
    paper_scale = budget.paper_scale or figure.papers_protocol
    return PlannedFigure(figure, tuple(panels), budget.name, paper_scale)


def _plan_panel(panel: PanelSpec, resolver: RunResolver, figure: str) -> PlannedPanel:
    choices = _choices(panel, resolver)
    why_not = _why_left_out(panel, choices, figure)
    if panel.file is not None or why_not is not None:
        return PlannedPanel(panel, why_not=why_not)

    skipped = _skipped_arms(panel, resolver)
    untuned = _untuned(panel, resolver, choices)
    why_not = _why_untrained(panel, resolver, choices, untuned)
    if why_not is not None:
        return PlannedPanel(panel, skipped=skipped, why_not=why_not)

    trained = {label: arm for label, arm in panel.arms.items() if label not in skipped}
    arms = _plan_arms(panel, trained, resolver, choices, f"{figure}: panel {panel.title!r}")
    warnings = KINDS[panel.kind].warnings(panel, choices)
    for why in untuned:
        have_one = "all arms have one learning rate and initial std"
        warnings.append(f"{panel.title}: {have_one}: {why}.")
    return PlannedPanel(panel, tuple(arms), skipped, warnings=tuple(warnings))


def _skipped_arms(panel: PanelSpec, resolver: RunResolver) -> dict[str, str]:
    """Return the arms that the budget does not train, each with the reason."""
    skipped = {}
    for label, arm in panel.arms.items():
        why_not = _why_no_arm(arm, panel, resolver)
        if why_not is not None:
            skipped[label] = why_not
    return skipped


def _why_no_arm(arm: ArmSpec, panel: PanelSpec, resolver: RunResolver) -> str | None:
    budget = resolver.budget.name
    if budget in arm.skip_under:
        return arm.skip_under[budget]
    if panel.lr is not None and budget not in (arm.lr or panel.lr):
        return f"no learning rate of its own is tuned under {budget}"
    return None if arm.model is None else resolver.why_no_model(arm.model)


def _choices(panel: PanelSpec, resolver: RunResolver) -> Choices:
    """Return what the budget chooses for a panel."""
    budget = resolver.budget
    roles = [role for role in _roles(panel) if resolver.why_no_model(role) is None]
    axes = {}
    for key, by_budget in panel.axes.items():
        if budget.name in by_budget:
            axes[key] = by_budget[budget.name]
    return Choices(budget.name, roles, axes, budget.first_seed)


def _roles(panel: PanelSpec) -> list[str]:
    return panel.models or [panel.model]


def _untuned(panel: PanelSpec, resolver: RunResolver, choices: Choices) -> list[str]:
    """Return why arms do not have their own optima, once per reason."""
    models = [resolver.budget.models[role] for role in choices.roles]
    reasons = [resolver.untuned(panel, model) for model in models]
    return list(dict.fromkeys(filter(None, reasons)))


def _why_left_out(panel: PanelSpec, choices: Choices, figure: str) -> str | None:
    """Return why the YAML of a figure leaves a panel out under a budget."""
    budget = choices.budget
    if budget in panel.skip_under:
        return panel.skip_under[budget]
    if panel.lr is not None and budget not in panel.lr:
        file = f"conf/paper/{figure}.yaml"
        hint = f"add one to lr in {file}; `lightning-sv sweep` finds it"
        return f"no learning rate is tuned under {budget}; {hint}"
    return None


def _why_untrained(
    panel: PanelSpec, resolver: RunResolver, choices: Choices, untuned: Sequence[str]
) -> str | None:
    """Return why a budget cannot train a panel: it lacks its models, optima or grid."""
    if not choices.roles:
        return resolver.why_no_model(_roles(panel)[0])
    if untuned and panel.tuned_as:
        return untuned[0]
    return KINDS[panel.kind].why_not(choices)


def _plan_arms(
    panel: PanelSpec,
    specs: Mapping[str, ArmSpec],
    resolver: RunResolver,
    choices: Choices,
    where: str,
) -> list[PlannedArm]:
    """Resolve the arms that the budget trains, at all of their points, with their seeds."""
    counts = {label: _seed_count(arm, panel, resolver.budget) for label, arm in specs.items()}
    _check_seeds(panel, counts, resolver.budget.name, where)

    kind = KINDS[panel.kind]
    first = kind.first_seed(choices)
    arms = []
    for label, spec in specs.items():
        seeds = tuple(range(first, first + counts[label]))
        for arm in kind.points(panel, label, spec, resolver, choices):
            arms.append(replace(arm, seeds=seeds, ours=spec.not_in_paper, baseline=spec.baseline))
    check_arms(arms, where)
    return arms


def _seed_count(arm: ArmSpec, panel: PanelSpec, budget: Budget) -> int:
    of_panel = panel.seeds.get(budget.name, budget.seeds)
    return arm.seeds.get(budget.name, of_panel)


def _check_seeds(panel: PanelSpec, counts: Mapping[str, int], budget: str, where: str) -> None:
    """Refuse a claim about an arm with one seed, because one pair has no interval."""
    for claim in panel.claims:
        seeds = [counts[label] for label in claim.arms if label in counts]
        is_tested = budget not in claim.skip_under and len(seeds) == len(claim.arms)
        if is_tested and min(seeds) < 2:
            hint = f"Increase it, or give its claims `skip_under: {{{budget}: why}}`."
            found = f"{where}: seeds under budget {budget} is 1"
            raise ConfigError(f"{found}; expected two or more to decide a claim. {hint}")


def check_arms(arms: Sequence[PlannedArm], where: str) -> None:
    """Refuse two arms of one name, or of one configuration.

    Raises:
        ConfigError: names both arms
    """
    labels = set[str]()
    configurations = dict[str, str]()
    for arm in arms:
        if arm.label in labels:
            twice = f"{arm.label!r} is the name of two arms"
            raise ConfigError(f"{where}: {twice}; expected different names. Change one of them.")
        labels.add(arm.label)
        other = configurations.setdefault(arm.run_spec.identity, arm.label)
        if other != arm.label:
            same = f"{other!r} and {arm.label!r} resolve to the same configuration"
            raise ConfigError(f"{where}: {same}; expected different arms. Remove one.")
