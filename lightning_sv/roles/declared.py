"""Roles that our own modules declare.

A trace finds the role of a vector of ours, too, but not of each of its parameters: beta of `or` is
one number for all channels. And options may give a vector a role other than that of its position.
"""

from collections.abc import Iterator

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from lightning_sv.roles.types import ModelRole
from lightning_sv.scale import ScaledLinear, ScaleVector


def declared_roles(model: nn.Module) -> dict[str, ModelRole]:
    """Return the declarations of our own modules, by name of the parameter."""
    declared: dict[str, ModelRole] = {}
    for path, module in model.named_modules():
        for name, role in _declared_by(module):
            full_name = f"{path}.{name}".removeprefix(".")
            declared.setdefault(full_name, role)  # the outer of nested vectors
    return declared


def _declared_by(module: nn.Module) -> Iterator[tuple[str, ModelRole]]:
    """Yield the parameters whose roles a module declares, by their names in it."""
    if isinstance(module, ScaledLinear):
        yield "weight", module.role
    if isinstance(module, ScaleVector):
        for name, _ in module.named_parameters():
            yield name, module.role
    if isinstance(module, ParametrizationList):
        role = getattr(module[0], "role_of_original", None)  # of apply_strategy
        if role is not None:
            yield "original", role
