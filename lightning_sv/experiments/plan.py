"""Plans of figures under a budget: the runs of their panels."""

from collections.abc import Sequence
from dataclasses import replace

from lightning_sv.errors import ConfigError, expect
from lightning_sv.experiments.arms import PlannedArm
from lightning_sv.experiments.budgeted_panel import BudgetedPanel
from lightning_sv.experiments.comparability import VALIDATION_KEYS, check_same_data
from lightning_sv.experiments.kinds.base import KINDS, PlannedPanel
from lightning_sv.experiments.panel_checks import check_panel
from lightning_sv.experiments.resolver import RunResolver
from lightning_sv.experiments.results import PlannedFigure
from lightning_sv.experiments.spec import ClaimSpec, FigureSpec


def plan_figure(figure: FigureSpec, resolver: RunResolver) -> PlannedFigure:
    """Resolve each arm of a figure, without its runs.

    Raises:
        ConfigError: names the figure, the panel and the key that is wrong
    """
    panels = []
    for spec in figure.panels:
        try:
            check_panel(spec)
            panels.append(_plan(BudgetedPanel(spec, figure.name, resolver)))
        except ConfigError as error:
            place = f"{figure.name}: panel {spec.title!r}"
            raise ConfigError(f"{place}: {error}") from error

    budget = resolver.budget
    paper_scale = budget.paper_scale or figure.papers_protocol
    return PlannedFigure(figure, tuple(panels), budget.name, paper_scale)


def _plan(panel: BudgetedPanel) -> PlannedPanel:
    why_left_out = _why_left_out(panel)
    if why_left_out is not None:
        return PlannedPanel(panel.spec, why_not=why_left_out)
    why_untrained = _why_untrained(panel)
    if why_untrained is not None:
        return PlannedPanel(panel.spec, skipped=panel.skipped, why_not=why_untrained)
    arms = tuple(_plan_arms(panel))
    warnings = [*KINDS[panel.spec.kind].warnings(panel)]
    have_one = "all arms have one learning rate and initial std"
    for reason in panel.why_untuned:
        warnings.append(f"{panel.spec.title}: {have_one}: {reason}.")
    spec = panel.spec_of_budget
    return PlannedPanel(spec, arms, skipped=panel.skipped, warnings=tuple(warnings))


def _why_left_out(panel: BudgetedPanel) -> str | None:
    """Return why the YAML of a figure leaves a panel out under a budget."""
    name = panel.budget.name
    spec = panel.spec
    if name in spec.skip_under:
        return spec.skip_under[name]
    if spec.lr is None or name in spec.lr:
        return None
    hint = f"add one to lr in conf/paper/{panel.figure}.yaml; `lightning-sv sweep` finds it"
    return f"no learning rate is tuned under {name}; {hint}"


def _why_untrained(panel: BudgetedPanel) -> str | None:
    """Return why a budget cannot train a panel: it lacks its models, arms, optima or grid."""
    if not panel.roles:
        return panel.resolver.why_no_model(panel.all_roles[0])
    if panel.skipped.keys() == panel.spec.arms.keys():
        return next(iter(panel.skipped.values()))
    needs_optima = panel.spec.needs_own_optima or panel.spec.shares_optimum
    if needs_optima and panel.why_untuned:
        return panel.why_untuned[0]
    return KINDS[panel.spec.kind].why_not(panel)


def _plan_arms(panel: BudgetedPanel) -> list[PlannedArm]:
    """Resolve the arms that the budget trains, at all of their points, with their seeds."""
    for claim in panel.spec.claims:
        _check_seeds(claim, panel)
    kind = KINDS[panel.spec.kind]
    first = kind.first_seed(panel)
    arms = []
    for label, spec in panel.spec.arms.items():
        if label in panel.skipped:
            continue
        count = panel.seed_count(spec)
        expect(
            count >= 1, f"seeds of {label!r} under budget {panel.budget.name}", count, "1 or more."
        )
        seeds = tuple(range(first, first + count))
        for arm in kind.points(panel, label, spec):
            arms.append(replace(arm, seeds=seeds, ours=spec.not_in_paper, baseline=spec.baseline))
    check_arms(arms)
    facts = {}
    for arm in arms:
        data = arm.run_spec.settings["data"]
        facts[arm.label] = {f"data.{key}": data.get(key) for key in VALIDATION_KEYS}
    check_same_data(facts, "arms")  # losses on different validation sets differ by that too
    return arms


def _check_seeds(claim: ClaimSpec, panel: BudgetedPanel) -> None:
    """Refuse a claim about an arm with one seed, because one pair has no interval."""
    budget = panel.budget.name
    is_tested = budget not in claim.skip_under and panel.skipped.keys().isdisjoint(claim.arms)
    if not is_tested:
        return
    for label in claim.arms:
        count = panel.seed_count(panel.spec.arms[label])
        hint = f"Increase it, or give its claims `skip_under: {{{budget}: why}}`."
        expected = f"two or more to decide a claim. {hint}"
        expect(count >= 2, f"seeds under budget {budget}", count, expected)


def check_arms(arms: Sequence[PlannedArm]) -> None:
    """Refuse two arms of one name, or of one configuration.

    Raises:
        ConfigError: names both arms
    """
    labels = set[str]()
    configurations = dict[str, str]()
    for arm in arms:
        if arm.label in labels:
            twice = f"{arm.label!r} is the name of two arms"
            raise ConfigError(f"{twice}; expected different names. Change one of them.")
        labels.add(arm.label)
        other = configurations.setdefault(arm.run_spec.identity, arm.label)
        if other != arm.label:
            same = f"{other!r} and {arm.label!r} resolve to the same configuration"
            raise ConfigError(f"{same}; expected different arms. Remove one.")
