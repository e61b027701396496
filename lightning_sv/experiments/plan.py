"""Plans of figures under a budget: the runs of their panels."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lightning_sv.errors import ConfigError, expect
from lightning_sv.experiments.arms import PlannedArm
from lightning_sv.experiments.kinds.base import KINDS, PanelKind, PlannedPanel
from lightning_sv.experiments.panel_checks import check_panel
from lightning_sv.experiments.resolver import RunResolver
from lightning_sv.experiments.results import PlannedFigure
from lightning_sv.experiments.run_spec import RunSpec
from lightning_sv.experiments.spec import (
    ArmSpec,
    Budget,
    ClaimSpec,
    FigureSpec,
    PanelSpec,
    values_under,
)


@dataclass(frozen=True)
class BudgetedPanel:
    """One panel under a budget, before its arms are planned.

    Attributes:
        spec: the panel
        figure: name of its figure
        resolver: resolver of arms under the budget
    """

    spec: PanelSpec
    figure: str
    resolver: RunResolver

    @property
    def budget(self) -> Budget:
        """Sizes, steps and seeds."""
        return self.resolver.budget

    @property
    def kind(self) -> PanelKind:
        """Rules of its kind."""
        return KINDS[self.spec.kind]

    @property
    def roles(self) -> list[str]:
        """Roles of its models that the budget has."""
        return [role for role in self.all_roles if self.resolver.why_no_model(role) is None]

    @property
    def all_roles(self) -> list[str]:
        """Roles of its models."""
        return self.spec.models or [self.spec.model]

    @property
    def axes(self) -> dict[str, list[int | float]]:
        """Key of a grid -> values."""
        return values_under(self.budget.name, self.spec.axes)

    @cached_property
    def skipped(self) -> dict[str, str]:
        """Arm -> why the budget does not train it."""
        reasons = {label: self._why_no_arm(arm) for label, arm in self.spec.arms.items()}
        return {label: reason for label, reason in reasons.items() if reason is not None}

    def _why_no_arm(self, arm: ArmSpec) -> str | None:
        name = self.budget.name
        if name in arm.skip_under:
            return arm.skip_under[name]
        if self.spec.lr is not None and name not in (arm.lr or self.spec.lr):
            return f"no learning rate of its own is tuned under {name}"
        if arm.model is None:
            return None
        return self.resolver.why_no_model(arm.model)

    @cached_property
    def untuned(self) -> list[str]:
        """Sentences on why arms do not have their own optima."""
        models = [self.budget.models[role] for role in self.roles]
        reasons = [self.resolver.untuned(self.spec, model) for model in models]
        return list(dict.fromkeys(filter(None, reasons)))

    @property
    def trained(self) -> dict[str, ArmSpec]:
        """Arms that the budget trains."""
        skipped = self.skipped
        return {label: arm for label, arm in self.spec.arms.items() if label not in skipped}

    def seed_count(self, arm: ArmSpec) -> int:
        """Return the number of runs of an arm."""
        name = self.budget.name
        if name in arm.seeds:
            return arm.seeds[name]
        return self.spec.seeds.get(name, self.budget.seeds)

    def resolve(self, arm: ArmSpec, role: str, point: Mapping[str, Any] | None = None) -> RunSpec:
        """Resolve an arm with the model of a role, at a point of a grid."""
        return self.resolver.resolve(self.spec, arm, role, point)


def plan_figure(figure: FigureSpec, resolver: RunResolver) -> PlannedFigure:
    """Resolve each arm of a figure, without its runs.

    Raises:
        ConfigError: names the figure, the panel and the key that is wrong
    """
    panels = [_checked_plan(BudgetedPanel(spec, figure.name, resolver)) for spec in figure.panels]
    budget = resolver.budget
    paper_scale = budget.paper_scale or figure.papers_protocol
    return PlannedFigure(figure, tuple(panels), budget.name, paper_scale)


def _checked_plan(panel: BudgetedPanel) -> PlannedPanel:
    try:
        check_panel(panel.spec)
        return _plan(panel)
    except ConfigError as error:
        place = f"{panel.figure}: panel {panel.spec.title!r}"
        raise ConfigError(f"{place}: {error}") from error


def _plan(panel: BudgetedPanel) -> PlannedPanel:
    why_not = _why_left_out(panel)
    if panel.spec.file is not None or why_not is not None:
        return PlannedPanel(panel.spec, why_not=why_not)
    why_not = _why_untrained(panel)
    if why_not is not None:
        return PlannedPanel(panel.spec, skipped=panel.skipped, why_not=why_not)
    arms = tuple(_plan_arms(panel))
    return PlannedPanel(panel.spec, arms, skipped=panel.skipped, warnings=tuple(_warnings(panel)))


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
    """Return why a budget cannot train a panel: it lacks its models, optima or grid."""
    if not panel.roles:
        return panel.resolver.why_no_model(panel.all_roles[0])
    if panel.untuned and panel.spec.tuned_as:
        return panel.untuned[0]
    return panel.kind.why_not(panel)


def _warnings(panel: BudgetedPanel) -> Iterator[str]:
    yield from panel.kind.warnings(panel)
    for why in panel.untuned:
        have_one = "all arms have one learning rate and initial std"
        yield f"{panel.spec.title}: {have_one}: {why}."


def _plan_arms(panel: BudgetedPanel) -> list[PlannedArm]:
    """Resolve the arms that the budget trains, at all of their points, with their seeds."""
    for claim in panel.spec.claims:
        _check_seeds(claim, panel)
    first = panel.kind.first_seed(panel)
    arms = []
    for label, spec in panel.trained.items():
        seeds = tuple(range(first, first + panel.seed_count(spec)))
        for arm in panel.kind.points(panel, label, spec):
            arms.append(replace(arm, seeds=seeds, ours=spec.not_in_paper, baseline=spec.baseline))
    check_arms(arms)
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
