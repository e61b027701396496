"""Folding of an applied strategy into the weights of a model.

    before    layer.weight = diag(gamma_out) W diag(gamma_in), computed at each read
    after     layer.weight is a parameter with that value, and gamma_in, gamma_out are gone

Everything is checked before the first weight changes, so an error leaves the model as it was.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from lightning_sv.errors import ConfigError
from lightning_sv.interop.apply.applied import APPLIED, FROZEN, REMOVE, Applied
from lightning_sv.interop.apply.saving import UnfoldedSave
from lightning_sv.interop.apply.weights import (
    OutputNorm,
    Scaled,
    remove_parametrization,
    scaled_modules,
)
from lightning_sv.roles.example_inputs import check_module

#: classes of sharded modules and parameters
_SHARDED = {"FSDPModule", "FullyShardedDataParallel", "DTensor"}
#: names of parameters that PEFT adds
_OF_LORA = re.compile(r"lora_|modules_to_save")


@torch.no_grad()
def fold_applied(model: nn.Module) -> nn.Module:
    """Fold the scale vectors of an applied strategy into the weights, in place.

    The model then has its own class and keys, and equal outputs; its norms train if other weights
    do. Fold before other tools read or change the weights, for instance before saving for other
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
    applied = [module for module in model.modules() if APPLIED in vars(module)]
    if not applied:
        name = type(model).__name__
        raise ConfigError(f"this {name} has no strategy; expected the model of apply_strategy.")
    _check_no_norm(model, vars(applied[0])[APPLIED])
    _check_unsharded(model)
    weights = list(_computed_weights(model))

    trained = [part for part in applied if _trains(part)]
    for weight in weights:
        remove_parametrization(weight.owner, weight.attribute, weight.order, keep=True)
    for part in trained:
        for parameter in _frozen(part):  # by name: a norm's vector has its name again
            parameter.requires_grad_(True)
    for part in applied:
        _unregister(part)
    return model


def _check_no_norm(model: nn.Module, applied: Applied) -> None:
    normed = []
    for path, module in scaled_modules(model).items():
        if isinstance(module, OutputNorm):
            normed.append(path)
    if normed:
        what = f"{applied.strategy.placement} normalizes the output of {normed[0]}"
        why = f"{what} ({len(normed)} such layers), which cannot be folded into a weight."
        hint = "Save the model by its state_dict() instead, and LoRA's adapters without a merge."
        raise ConfigError(f"{why} {hint}")


def _check_unsharded(model: nn.Module) -> None:
    kinds = {type(parameter.data).__name__ for parameter in model.parameters()}
    for module in model.modules():
        for kind in type(module).__mro__:
            kinds.add(kind.__name__)
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
        lists = module._modules.get("parametrizations")  # getattr would look inside a wrapper
        if not isinstance(lists, nn.ModuleDict):
            continue
        for attribute, parametrizations in lists.items():
            first, *others = parametrizations.children()
            if not isinstance(first, Scaled):
                continue
            if others:
                again = f"was parametrized again after apply_strategy ({type(others[0]).__name__})"
                raise ConfigError(f"{path}.{attribute} {again}; {REMOVE}.")
            yield _Weight(module, attribute, first.order)


def _frozen(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that the strategy froze, also those of layers copied afterwards."""
    for module in model.modules():
        for name in vars(module).get(FROZEN, ()):
            parameter = module._parameters.get(name)
            if parameter is not None:
                yield parameter


def _trains(model: nn.Module) -> bool:
    """Return True if anything but LoRA's adapters trains."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not _OF_LORA.search(name):
            return True
    return False


def _unregister(model: nn.Module) -> None:
    """Remove the hooks and marks of a strategy."""
    for handle in vars(model)[APPLIED].handles:
        handle.remove()
    for module in model.modules():
        vars(module).pop(FROZEN, None)
        save = vars(module).get("save_pretrained")
        if isinstance(save, UnfoldedSave):
            save.remove()
    delattr(model, APPLIED)
