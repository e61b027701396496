"""The classification of all parameters of a model."""

from dataclasses import dataclass
from functools import cached_property

from lightning_sv.roles.table import parameter_table
from lightning_sv.roles.types import ModelParameter


@dataclass(frozen=True)
class Roles:
    """All parameters of a model, in the order of `named_parameters`; as text a table."""

    parameters: tuple[ModelParameter, ...]

    @cached_property
    def _by_name(self) -> dict[str, ModelParameter]:
        return {parameter.name: parameter for parameter in self.parameters}

    def __str__(self) -> str:
        """Return a table with one row per kind of parameter, and its decay under 'iwd'."""
        return parameter_table(self.parameters)

    def __getitem__(self, name: str) -> ModelParameter:
        """Return the parameter of that name."""
        return self._by_name[name]

    def decayed(self, policy: str = "iwd") -> list[str]:
        """Return the names of the trained parameters that decay under `policy`."""
        return self._trained_names(policy, decays=True)

    def undecayed(self, policy: str = "iwd") -> list[str]:
        """Return the names of the trained parameters that do not decay under `policy`."""
        return self._trained_names(policy, decays=False)

    def _trained_names(self, policy: str, *, decays: bool) -> list[str]:
        names = []
        for parameter in self.parameters:
            if parameter.trained and parameter.decays(policy) == decays:
                names.append(parameter.name)
        return names
