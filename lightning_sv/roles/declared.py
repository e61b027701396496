"""Roles that our own modules declare."""

from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake, unset_fake_temporarily
from torch.func import functional_call

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
        prefix = f"{path}." if path else ""
        original = getattr(module, "role_of_original", None)  # a parametrization of apply_strategy
        if isinstance(module, ScaleVector):
            of_vector = Declared(module.role, _at_zero(module))
            for name, _ in module.named_parameters():
                declared.setdefault(prefix + name, of_vector)  # the outer of nested vectors
        elif isinstance(module, ScaledLinear):
            declared[f"{prefix}weight"] = Declared(module.role)
        elif original is not None:
            declared[f"{path.rpartition('.')[0]}.original"] = Declared(original)
    return declared


def _at_zero(vector: ScaleVector) -> float | None:
    """Return gamma for parameters of 0; None if it is not one number."""
    if any(buffer.is_meta or is_fake(buffer) for buffer in vector.buffers()):
        return None
    state = {name: buffer.cpu() for name, buffer in vector.named_buffers()}
    for name, parameter in vector.named_parameters():
        state[name] = torch.zeros(parameter.shape, dtype=parameter.dtype, device="cpu")
    with unset_fake_temporarily(), torch.no_grad():
        gamma = functional_call(vector, state, ())
        gamma = gamma.nan_to_num().flatten()  # of `or`, whose direction is undefined and beta is 0
    return float(gamma[0]) if (gamma == gamma[0]).all() else None
