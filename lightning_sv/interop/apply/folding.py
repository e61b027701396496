"""Folding of an applied strategy into the weights of a model.

    before    layer.weight = diag(gamma_out) W diag(gamma_in), computed at each read
    after     layer.weight is a parameter with that value, and gamma_in, gamma_out are gone

Everything is checked before the first weight changes, so an error leaves the model as it was.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from lightning_sv.errors import ConfigError
from lightning_sv.interop.apply.applied import APPLIED, FROZEN, REMOVE, Applied
from lightning_sv.interop.apply.saving import UnfoldedSave
from lightning_sv.interop.apply.weights import Scaled, output_norm_hook, remove_parametrization
from lightning_sv.roles.example_inputs import check_module
from lightning_sv.scale import ScaleVector

#: classes of sharded modules and parameters
_SHARDED = {"FSDPModule", "FullyShardedDataParallel", "DTensor"}
#: names of parameters that PEFT adds
_OF_LORA = re.compile(r"lora_|modules_to_save")


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
    applied = list(_applied_models(model))
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


def _applied_models(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the models inside that have an applied strategy."""
    for module in model.modules():
        if isinstance(vars(module).get(APPLIED), Applied):
            yield module


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


def _frozen(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that the strategy froze, also those of layers copied afterwards."""
    for module in model.modules():
        for name in vars(module).get(FROZEN, ()):
            parameter = module._parameters.get(name)
            if parameter is not None:
                yield parameter


def _trains(model: nn.Module) -> bool:
    """Return True if a scale vector trains, or without vectors another weight."""
    candidates = set(_parameters_of_vectors(model)) or set(_weights(model))
    candidates.difference_update(_frozen(model))
    return any(parameter.requires_grad for parameter in candidates)


def _parameters_of_vectors(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of the vectors but for those of the copies that PEFT trains."""
    for path, module in model.named_modules():
        if isinstance(module, ScaleVector) and not _OF_LORA.search(path):
            yield from module.parameters()


def _weights(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters but for LoRA's, which train while all others are frozen."""
    for name, parameter in model.named_parameters():
        if not _OF_LORA.search(name):
            yield parameter


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
