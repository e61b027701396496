"""Folding of an applied strategy into the weights of a model."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from lightning_sv.errors import ConfigError
from lightning_sv.interop.apply.applied import APPLIED, FROZEN, REMOVE, Applied
from lightning_sv.interop.apply.saving import save_unfolded
from lightning_sv.interop.apply.weights import Scaled, output_norm_hook, remove_parametrization
from lightning_sv.roles.example_inputs import check_module
from lightning_sv.scale import ScaleVector

#: classes of sharded modules and parameters
_SHARDED = {"FSDPModule", "FullyShardedDataParallel", "DTensor"}


@torch.no_grad()
def fold_applied(model: nn.Module) -> nn.Module:
    """Fold the scale vectors of an applied strategy into the weights, in place.

    The model then has its own class and keys, and equal outputs; its norms train if the vectors
    did. Fold before other tools read or change the weights, for instance before saving for other
    code or LoRA's merge.

    Args:
        model: model after `apply_strategy`, or a wrapper of it

    Returns:
        The model itself.

    Raises:
        ConfigError: no strategy was applied; its norms (`dnp`) cannot be folded; the model is
            sharded; or a weight was parametrized again. The model is then unchanged
    """
    check_module(model)
    applied = [each for each in model.modules() if isinstance(vars(each).get(APPLIED), Applied)]
    if not applied:
        name = type(model).__name__
        raise ConfigError(f"this {name} has no strategy; expected the model of apply_strategy.")
    _check_no_norm(model, vars(applied[0])[APPLIED])
    _check_unsharded(model)
    weights = list(_computed_weights(model))

    trained = [each for each in applied if _trains(each)]
    for weight in weights:
        remove_parametrization(weight.owner, weight.attribute, weight.order, keep=True)
    for each in trained:
        for parameter in _frozen(each):
            parameter.requires_grad_(True)
    for each in applied:
        _unregister(each)
    return model


def _check_no_norm(model: nn.Module, applied: Applied) -> None:
    normed = []
    for path, module in model.named_modules():
        if output_norm_hook in module._forward_hooks.values():
            normed.append(path)
    if normed:
        what = f"{applied.strategy.placement} normalizes the output of {normed[0]}"
        why = f"{what} ({len(normed)} such layers), which cannot be folded into a weight."
        hint = "Save the model by its state_dict() instead, and LoRA's adapters without a merge."
        raise ConfigError(f"{why} {hint}")


def _check_unsharded(model: nn.Module) -> None:
    kinds = {type(parameter.data).__name__ for parameter in model.parameters()}
    for module in model.modules():
        kinds.update(kind.__name__ for kind in type(module).__mro__)
    sharded = sorted(kinds & _SHARDED)
    if sharded:
        hint = "Load its full state dict into an unsharded model with the same strategy."
        raise ConfigError(f"model is sharded ({sharded[0]}); expected an unsharded one. {hint}")


class _Weight(NamedTuple):
    """A computed weight: its module, name, and the order of the module's parameters."""

    owner: nn.Module
    attribute: str
    order: tuple[str, ...]


def _computed_weights(model: nn.Module) -> Iterator[_Weight]:
    for path, module in model.named_modules():
        for attribute, parametrizations in scaled_weights(module).items():
            if len(parametrizations) > 1:
                kind = type(parametrizations[1]).__name__
                again = f"was parametrized again after apply_strategy ({kind})"
                raise ConfigError(f"{path}.{attribute} {again}; {REMOVE}.")
            yield _Weight(module, attribute, parametrizations[0].order)


def scaled_weights(module: nn.Module) -> dict[str, Any]:
    """Return the strategy's parametrizations of a module's own parameters, by attribute."""
    found = module._modules.get("parametrizations")  # getattr would look inside a wrapper
    if not isinstance(found, nn.ModuleDict):
        return {}
    return {name: each for name, each in found.items() if _is_scaled(each)}


def _is_scaled(parametrizations: Any) -> bool:
    is_list = isinstance(parametrizations, parametrize.ParametrizationList)
    return is_list and isinstance(parametrizations[0], Scaled)


def _frozen(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that the strategy froze, also those of layers copied afterwards."""
    frozen = []
    for module in model.modules():
        names = vars(module).get(FROZEN, ())
        frozen += [module._parameters.get(name) for name in names]
    return [parameter for parameter in frozen if parameter is not None]


def _trains(model: nn.Module) -> bool:
    """Return True if a scale vector trains, or without vectors another weight.

    LoRA and users freeze all of them.
    """
    candidates: list[nn.Parameter] = []
    for module in model.modules():
        if isinstance(module, ScaleVector):
            candidates += module.parameters()
    if not candidates:
        named = model.named_parameters()
        candidates = [p for name, p in named if not re.search(r"lora_|modules_to_save", name)]
    frozen = {id(parameter) for parameter in _frozen(model)}
    return any(p.requires_grad for p in candidates if id(p) not in frozen)


def _unregister(model: nn.Module) -> None:
    """Remove the hooks and marks of a strategy."""
    for handle in vars(model)[APPLIED].handles:
        handle.remove()
    for module in model.modules():
        vars(module).pop(FROZEN, None)
        save = vars(module).get("save_pretrained")
        if getattr(save, "func", None) is save_unfolded:
            delattr(module, "save_pretrained")
    delattr(model, APPLIED)
