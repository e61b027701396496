"""Checks of a model with an applied strategy, in training and loading.

Other code can undo a strategy without an error, so hooks of the model check two things:

    before each training step    no module lost its vectors, and no constant vector trains
    before a state is loaded     constant vectors of the state have their constant

A constant vector is one that moved into the matrices behind it. Its norm keeps 1.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_sv.errors import ConfigError, expect
from lightning_sv.interop.apply.applied import APPLIED, Applied
from lightning_sv.interop.apply.weights import scaled_modules
from lightning_sv.interop.groups import unwrapped


def check_complete(model: nn.Module, args: Any) -> None:
    """Check in training that no module lost its scale vectors, and no constant vector trains."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    applied: Applied = vars(model)[APPLIED]
    missing = sorted(applied.weights - scaled_modules(model).keys())
    if missing:
        _check_not_replaced(model, missing)
    for name in applied.constants:
        if _trains(model, name):
            wanted = "False, because this vector is constant in the strategy."
            raise ConfigError(f"{name}.requires_grad is True; expected {wanted}")


def _check_not_replaced(model: nn.Module, missing: list[str]) -> None:
    """Refuse a new module in the place of one with vectors; a stage of a pipeline lacks modules."""
    modules = {unwrapped(path): module for path, module in model.named_modules()}
    for name in missing:
        module = modules.get(unwrapped(name.rpartition(".")[0]), nn.Identity())
        if _has_parameters_alone(module):
            why = "because a new module replaced it, as in resize_token_embeddings"
            hint = "Call fold_applied(model), then apply_strategy again."
            raise ConfigError(f"{name} has lost its scale vectors, {why}. {hint}")


def _has_parameters_alone(module: nn.Module) -> bool:
    """Return True for a module with parameters and without vectors."""
    has_parameters = next(module.parameters(), None) is not None
    return has_parameters and not scaled_modules(module)


def _trains(model: nn.Module, name: str) -> bool:
    try:
        return model.get_parameter(name).requires_grad
    except AttributeError:  # gone, or a view of FSDP1
        return False


def check_state(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Check the constant vectors of a state dict, before it is loaded."""
    parameters = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):  # several if tied
        parameters[unwrapped(name)] = parameter
    constants = _constants(module, parameters)

    for key, value in state.items():
        name = unwrapped(key.removeprefix(prefix))
        constant = constants.get(parameters.get(name))
        if key.startswith(prefix) and constant is not None and _has_values(value):
            _check_constant(name, value, constant)


def _constants(model: nn.Module, parameters: dict[str, nn.Parameter]) -> dict[Any, float]:
    """Return the constant vectors with a known value, and these values."""
    applied: Applied = vars(model)[APPLIED]
    constants = {}
    for name, constant in applied.constants.items():
        vector = parameters.get(unwrapped(name))
        if vector is not None and constant is not None:
            constants[vector] = constant
    return constants


def _check_constant(name: str, loaded: Tensor, constant: float) -> None:
    """Check a loaded vector; a mean of several states has a rounded constant."""
    is_constant = bool(((loaded - constant).abs() < 1e-5).all())
    hint = "Load a plain model's state before apply_strategy."
    expect(is_constant, name, "a trained vector", f"{constant:g} in all entries. {hint}")


def _has_values(value: Any) -> bool:
    return type(value) in (Tensor, nn.Parameter) and not value.is_meta
