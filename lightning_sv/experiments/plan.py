"""Plans of figures under a budget: the runs of their panels."""

from collections.abc import Sequence
from dataclasses import replace

from lightning_sv.errors import ConfigError
from lightning_sv.experiments.arms import PlannedArm
from lightning_sv.experiments.budgeted_panel import BudgetedPanel
from lightning_sv.experiments.comparability import VALIDATION_KEYS, check_same_data
from lightning_sv.experiments.kinds.base import KINDS, PlannedPanel, by_size
from lightning_sv.experiments.panel_checks import check_panel
from lightning_sv.experiments.resolver import RunResolver
from lightning_sv.experiments.results import PlannedFigure
from lightning_sv.experiments.spec import FigureSpec


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
    warnings = []
    have_one = "all arms have one learning rate and initial std"
    for reason in panel.why_untuned:
        warnings.append(f"{panel.spec.title}: {have_one}: {reason}.")
    axes_of_budget = {key: panel.spec.axes[key] for key in panel.axes}
    spec = replace(panel.spec, axes=axes_of_budget)
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
    kind = KINDS[panel.spec.kind]
    first = kind.first_seed(panel)
    arms = []
    for label, spec in panel.spec.arms.items():
        if label in panel.skipped:
            continue
        seeds = tuple(range(first, first + panel.seed_count(spec)))
        for arm in kind.points(panel, label, spec):
            arms.append(replace(arm, seeds=seeds, ours=spec.not_in_paper, baseline=spec.baseline))
    check_arms(arms)
    for group in by_size(arms):  # losses on different validation sets differ by that too
        facts = {}
        for arm in group:
            data = arm.run_spec.settings["data"]
            facts[arm.label] = {f"data.{key}": data.get(key) for key in VALIDATION_KEYS}
        check_same_data(facts, "arms")
    return arms


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
