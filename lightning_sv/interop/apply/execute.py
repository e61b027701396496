"""Execution of a plan, and its end: undoing it, or folding it into the weights."""

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from lightning_sv.errors import ConfigError
from lightning_sv.interop.apply.plan import Plan
from lightning_sv.interop.apply.weights import OutputNorm, ScaledGamma, ScaledWeight, output_norm_hook
from lightning_sv.interop.groups import unwrapped

#: attribute of an applied model with the state for `fold_applied`
APPLIED = "applied_strategy"


class Applied(NamedTuple):
    """State that folding restores."""

    frozen: list[str]  #: parameters of the plain model that train again after folding
    sites: frozenset[str]  #: names of the weights and layers with scale vectors
    handles: list[Any]  #: handles of the model's hooks


@torch.no_grad()
def execute(model: nn.Module, plan: Plan, undo: ExitStack) -> None:
    """Execute the plan; closing `undo` restores the model exactly."""
    named = dict(model.named_parameters())
    for name, value in plan.values.items():
        undo.callback(named[name].data.copy_, named[name].detach().clone())
        named[name].copy_(value)
    frozen = [name for name in plan.frozen if named[name].requires_grad]
    for name in frozen:
        undo.callback(named[name].requires_grad_, True)
        named[name].requires_grad_(False)
    orders: dict[nn.Module, list[str]] = {}
    for name, parametrization in (plan.weights | plan.gammas).items():
        path, _, attribute = name.rpartition(".")
        owner = model.get_submodule(path)
        order = orders.setdefault(owner, list(owner._parameters))
        undo.callback(_remove, owner, attribute, order, keep=False)
        parametrize.register_parametrization(owner, attribute, parametrization)
        parametrization.order, parametrization.site = order, name
    for path, norm in plan.outputs.items():
        layer = model.get_submodule(path)
        layer.add_module("output_norm", norm)
        norm.site = path
        undo.callback(layer.__delattr__, "output_norm")
        undo.callback(layer.register_forward_hook(output_norm_hook).remove)
    handles: list[Any] = [model.register_forward_pre_hook(_check_complete)]
    if changed := [*plan.weights, *plan.gammas]:
        handles += _guard_state_dict(model, changed[0])
    for handle in handles:
        undo.callback(handle.remove)
    setattr(model, APPLIED, Applied(frozen, frozenset([*changed, *plan.outputs]), handles))
    undo.callback(model.__delattr__, APPLIED)


@torch.no_grad()
def fold_applied(model: nn.Module) -> nn.Module:
    """Fold the scale vectors of an applied strategy into the weights, in place.

    The model then has its own class and keys, all its parameters train, and its outputs are bitwise equal. Fold before
    another tool reads or changes the weights, for instance before saving for other code or LoRA's merge.

    Args:
        model: model after `apply_strategy`, or a wrapper of it

    Returns:
        The model itself.

    Raises:
        ConfigError: no strategy was applied; its norms (`dnp`) cannot be folded; or a weight was parametrized
            again. The model is then unchanged
    """
    inners = applied_modules(model)
    if not inners:
        raise ConfigError(f"this {type(model).__name__} has no strategy; expected the model of apply_strategy.")
    normed = [path for path, module in model.named_modules() if output_norm_hook in module._forward_hooks.values()]
    if normed:
        raise ConfigError(
            f"dnp normalizes the output of {normed[0]} ({len(normed)} such layers), which cannot be folded into a "
            "weight. Save the model by its state_dict() instead."
        )
    planned = []
    for path, module in list(model.named_modules()):
        for attribute, chain in strategy_chains(module).items():
            if len(chain) > 1:
                raise ConfigError(
                    f"{path}.{attribute} was parametrized again after apply_strategy ({type(chain[1]).__name__}); "
                    "remove that first with torch.nn.utils.parametrize.remove_parametrizations."
                )
            getattr(module, attribute)  # fail before any change if it cannot be computed
            planned.append((module, attribute, chain[0].order))
    for module, attribute, order in planned:
        _remove(module, attribute, order, keep=True)
    for inner in inners:
        applied: Applied = vars(inner)[APPLIED]
        for handle in applied.handles:
            handle.remove()
        named = {unwrapped(name): parameter for name, parameter in inner.named_parameters()}
        for name in applied.frozen:
            if inner is uncompiled(model) and unwrapped(name) in named:  # otherwise the wrapper decides
                named[unwrapped(name)].requires_grad_(True)
        delattr(inner, APPLIED)
    return model


def applied_modules(model: nn.Module) -> list[nn.Module]:
    """Return the models inside `model` that have a strategy."""
    return [module for module in model.modules() if isinstance(vars(module).get(APPLIED), Applied)]


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile's wrapper, which forwards attributes to it."""
    while "_orig_mod" in model._modules:
        model = model.get_submodule("_orig_mod")
    return model


def strategy_chains(module: nn.Module) -> dict[str, Any]:
    """Return the strategy's parametrizations of a module's own parameters, by attribute."""
    chains: Any = module._modules.get("parametrizations")  # getattr would look inside a wrapper
    return {
        name: chain
        for name, chain in (chains.items() if isinstance(chains, nn.ModuleDict) else ())
        if isinstance(chain, parametrize.ParametrizationList) and isinstance(chain[0], (ScaledWeight, ScaledGamma))
    }


def _check_complete(model: nn.Module, args: Any) -> None:
    """Check in training that no module with scale vectors was replaced.

    Raises:
        ConfigError: vectors are missing
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    present: set[str] = set()
    seen: set[nn.Module] = set()
    pending: list[nn.Module] = [model]
    while pending:  # faster than model.modules(), because this runs in every training step
        module = pending.pop()
        seen.add(module)
        if isinstance(module, (ScaledWeight, ScaledGamma, OutputNorm)):
            present.add(module.site)
        else:
            pending += [child for child in module._modules.values() if child is not None and child not in seen]
    if missing := sorted(vars(model)[APPLIED].sites - present):
        raise ConfigError(
            f"{missing[0]} has lost its scale vectors, because another module replaced it, as in "
            "resize_token_embeddings. Call fold_applied(model), then apply_strategy again."
        )


def _remove(owner: nn.Module, attribute: str, order: list[str], *, keep: bool) -> None:
    """Remove a parametrization, keeping the computed weight (`keep`) or the original one, and restore the order."""
    if not parametrize.is_parametrized(owner, attribute):
        return
    kind = type(owner)  # deep copies share their class, from which torch would delete the attribute
    members = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    owner.__class__ = type(kind.__name__, kind.__bases__, members)
    parametrize.remove_parametrizations(owner, attribute, leave_parametrized=keep)
    for name in order:
        if name in owner._parameters:
            owner._parameters[name] = owner._parameters.pop(name)


def _guard_state_dict(model: nn.Module, name: str) -> list[Any]:
    """Add an empty tensor under `name` to the state dict, so that loading it into the plain model fails.

    Otherwise transformers would load it with random numbers for every scaled weight, and only list their names.
    """

    def save(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[prefix + name] = torch.zeros(0)

    def load(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state.pop(prefix + name, None)

    return [model.register_state_dict_post_hook(save), model.register_load_state_dict_pre_hook(load)]
