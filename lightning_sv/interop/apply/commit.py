"""A plan is carried out, taken back, or folded away."""

import functools
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_sv.interop.apply.plan import Plan
from lightning_sv.interop.apply.weights import ScaledGamma, ScaledWeight, output_norm_hook

#: attribute of an applied model: what `fold_applied` has to give back
APPLIED = "applied_strategy"


class Applied:
    """What is to be given back.

    Attributes:
        frozen: parameters of the plain model that train again after folding
        handles: of the two hooks of the tripwire
    """

    def __init__(self, frozen: list[str], handles: list[Any]):
        self.frozen, self.handles = frozen, handles


@torch.no_grad()
def commit(model: nn.Module, plan: Plan) -> ExitStack:
    """Carry out the plan; closing what is returned takes everything back, to the bit."""
    undo = ExitStack()
    named = dict(model.named_parameters())
    with ExitStack() as failed:
        failed.enter_context(undo)
        for name, value in plan.values.items():
            undo.callback(_set, named[name], named[name].detach().clone())
            named[name].copy_(value)
        frozen = [name for name in plan.frozen if named[name].requires_grad]
        for name in frozen:
            undo.callback(named[name].requires_grad_, True)
            named[name].requires_grad_(False)
        orders: dict[nn.Module, list[str]] = {}
        for name, parametrization in (plan.weights | plan.gammas).items():
            owner, attribute = _owner(model, name)
            order = orders.setdefault(owner, list(owner._parameters))
            undo.callback(_remove, owner, attribute, order, keep=False)
            parametrize.register_parametrization(owner, attribute, parametrization)
            parametrization.order = order
        for path, norm in plan.outputs.items():
            layer = model.get_submodule(path)
            layer.add_module("output_norm", norm)
            undo.callback(layer.__delattr__, "output_norm")
            undo.callback(layer.register_forward_hook(output_norm_hook).remove)
        handles: list[Any] = []
        if changed := [*plan.weights, *plan.gammas]:
            handles = _tripwire(model, changed[0])
            for handle in handles:
                undo.callback(handle.remove)
        setattr(model, APPLIED, Applied(frozen, handles))
        undo.callback(model.__delattr__, APPLIED)
        failed.pop_all()
    return undo


@torch.no_grad()
def fold_applied(model: nn.Module) -> nn.Module:
    """Take a strategy away again: the scale vectors become part of the weights, in place, with the same function.

    The model is of its own class with its own keys afterwards, and all its parameters train; what it computes is the
    same to the bit. Fold before another tool reads or changes the weights: saving for other code, LoRA's merge.

    Args:
        model: to which `apply_strategy` was applied, or what wraps it

    Returns:
        the model itself

    Raises:
        ValueError: no strategy was applied, or norms that it added (`dnp`) would be left
    """
    inner = next((module for module in model.modules() if APPLIED in vars(module)), None)
    applied = None if inner is None else vars(inner)[APPLIED]
    if inner is None or not isinstance(applied, Applied):
        raise ValueError(f"no strategy was applied to this {type(model).__name__}; give the model of apply_strategy.")
    normed = [path for path, module in model.named_modules() if output_norm_hook in module._forward_hooks.values()]
    if normed:
        raise ValueError(
            f"dnp normalizes the output of {normed[0]} ({len(normed)} such layers): no weight can take that norm up, "
            "and the model's own class has none there; keep the model as it is, in state_dict()."
        )
    for module in list(model.modules()):
        for attribute, parametrization in _parametrizations(module).items():
            _remove(module, attribute, parametrization.order, keep=True)
    for handle in applied.handles:
        handle.remove()
    named = dict(inner.named_parameters())
    for name in applied.frozen:
        if inner is model and name in named:  # another tool that wraps the model decides what trains
            named[name].requires_grad_(True)
    delattr(inner, APPLIED)
    return model


def _parametrizations(module: nn.Module) -> dict[str, ScaledWeight | ScaledGamma]:
    """Return the strategy's parametrizations of a module's own parameters, by attribute."""
    chains = getattr(module, "parametrizations", {}) if parametrize.is_parametrized(module) else {}
    firsts = {name: chain[0] for name, chain in chains.items()}
    return {name: first for name, first in firsts.items() if isinstance(first, (ScaledWeight, ScaledGamma))}


def _set(parameter: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def _remove(owner: nn.Module, attribute: str, order: list[str], *, keep: bool) -> None:
    """End a parametrization, with the computed weight (`keep`) or with the one before it; restore the order."""
    if not parametrize.is_parametrized(owner, attribute):
        return
    kind = type(owner)  # deep copies share the class of the original, from which torch would take the attribute
    members = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    owner.__class__ = type(kind.__name__, kind.__bases__, members)
    parametrize.remove_parametrizations(owner, attribute, leave_parametrized=keep)
    for name in order:
        if name in owner._parameters:
            owner._parameters[name] = owner._parameters.pop(name)


def _tripwire(model: nn.Module, name: str) -> list[Any]:
    """Let a saved state hold `name`, which it has no longer, in a shape that no plain model takes.

    Without it, transformers would load such a state with random numbers in place of every scaled weight, and only
    list their names.
    """
    save, load = functools.partial(_lay, name), functools.partial(_lift, name)
    return [model.register_state_dict_post_hook(save), model.register_load_state_dict_pre_hook(load)]


def _lay(name: str, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[prefix + name] = torch.zeros(0)


def _lift(name: str, module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    state.pop(prefix + name, None)
