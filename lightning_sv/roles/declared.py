"""Roles that our own modules declare.

A trace finds the role of a vector of ours, too, but not of each of its parameters: beta of `or` is
one number for all channels. And options may give a vector a role other than that of its position.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake, unset_fake_temporarily
from torch.func import functional_call
from torch.nn.utils.parametrize import ParametrizationList

from lightning_sv.roles.types import ModelRole
from lightning_sv.scale import ScaledLinear, ScaleVector


class Declared(NamedTuple):
    """Role of a parameter, and gamma at 0, to which decay pulls it; None if that is unknown."""

    role: ModelRole
    decays_to: float | None = None


def declared_roles(model: nn.Module) -> dict[str, Declared]:
    """Return the declarations of our own modules, by name of the parameter."""
    declared: dict[str, Declared] = {}
    for path, module in model.named_modules():
        for name, of_parameter in _declared_by(module):
            full_name = f"{path}.{name}".removeprefix(".")
            declared.setdefault(full_name, of_parameter)  # the outer of nested vectors
    return declared


def _declared_by(module: nn.Module) -> Iterator[tuple[str, Declared]]:
    """Yield the parameters whose roles a module declares, by their names in it."""
    if isinstance(module, ScaledLinear):
        yield "weight", Declared(module.role)
    if isinstance(module, ScaleVector):
        of_vector = Declared(module.role, _at_zero(module))
        for name, _ in module.named_parameters():
            yield name, of_vector
    if isinstance(module, ParametrizationList):
        role = getattr(module[0], "role_of_original", None)  # of apply_strategy
        if role is not None:
            yield "original", Declared(role)


def _at_zero(vector: ScaleVector) -> float | None:
    """Return gamma for parameters of 0; None if it is not one number."""
    if any(buffer.is_meta or is_fake(buffer) for buffer in vector.buffers()):
        return None
    with unset_fake_temporarily(), torch.no_grad():
        state = {name: buffer.cpu() for name, buffer in vector.named_buffers()}
        for name, parameter in vector.named_parameters():
            state[name] = torch.zeros(parameter.shape, dtype=parameter.dtype, device="cpu")
        gamma = functional_call(vector, state, ())
        gamma = gamma.nan_to_num()  # of `or`, whose direction is undefined and beta is 0
    lowest, highest = gamma.aminmax()
    return float(lowest) if lowest == highest else None
