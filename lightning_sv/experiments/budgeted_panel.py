"""A panel under a budget: what the budget trains of it, and with which settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lightning_sv.experiments.resolver import RunResolver
from lightning_sv.experiments.run_spec import RunSpec
from lightning_sv.experiments.spec import ArmSpec, Budget, PanelSpec, values_under


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
        reasons = {}
        for label, arm in self.spec.arms.items():
            why_not = self._why_no_arm(arm)
            if why_not is not None:
                reasons[label] = why_not
        return reasons

    def _why_no_arm(self, arm: ArmSpec) -> str | None:
        name = self.budget.name
        if name in arm.skip_under:
            return arm.skip_under[name]
        if self.spec.lr is not None:
            rates = arm.lr or self.spec.lr
            if name not in rates:
                return f"no learning rate of its own is tuned under {name}"
        if arm.model is None:
            return None
        return self.resolver.why_no_model(arm.model)

    @cached_property
    def why_untuned(self) -> list[str]:
        """Sentences on why arms do not have their own optima."""
        models = [self.budget.models[role] for role in self.roles]
        reasons = [self.resolver.why_untuned(self.spec, model) for model in models]
        return list(dict.fromkeys(filter(None, reasons)))

    def seed_count(self, arm: ArmSpec) -> int:
        """Return the number of runs of an arm."""
        name = self.budget.name
        if name in arm.seeds:
            return arm.seeds[name]
        if name in self.spec.seeds:
            return self.spec.seeds[name]
        return self.budget.seeds

    def resolve(self, arm: ArmSpec, role: str, point: Mapping[str, Any] | None = None) -> RunSpec:
        """Resolve an arm with the model of a role, at a point of a grid."""
        return self.resolver.resolve(self.spec, arm, role, point)
