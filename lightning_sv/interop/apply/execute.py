"""Execution of a plan, and its end: undone, or folded into the weights."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from lightning_sv.errors import ConfigError
from lightning_sv.interop.apply.plan import Plan
from lightning_sv.interop.apply.weights import OutputNorm, ScaledGamma, ScaledWeight, output_norm_hook
from lightning_sv.interop.groups import unwrapped

#: attribute of an applied model: what `fold_applied` has to give back
APPLIED = "applied_strategy"


class Applied:
    """State that folding gives back.

    Attributes:
        frozen: parameters of the plain model that train again after folding
        sites: names of the weights and layers that hold scale vectors
        handles: handles of the model's hooks
    """

    def __init__(self, frozen: list[str], sites: frozenset[str], handles: list[Any]):
        self.frozen, self.sites, self.handles = frozen, sites, handles


@torch.no_grad()
def execute(model: nn.Module, plan: Plan) -> ExitStack:
    """Carry out the plan; closing what is returned takes everything back, to the bit."""
    undo = ExitStack()
    named = dict(model.named_parameters())
    with ExitStack() as failed:
        failed.enter_context(undo)
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
        ConfigError: no strategy was applied; norms that it added (`dnp`) would be left; or a weight was parametrized
            again since. Nothing is changed then
    """
    inners = applied_modules(model)
    if not inners:
        raise ConfigError(f"no strategy was applied to this {type(model).__name__}; give the model of apply_strategy.")
    normed = [path for path, module in model.named_modules() if output_norm_hook in module._forward_hooks.values()]
    if normed:
        raise ConfigError(
            f"dnp normalizes the output of {normed[0]} ({len(normed)} such layers): no weight can take that norm up, "
            "and the model's own class has none there; keep the model as it is, in state_dict()."
        )
    planned = []
    for path, module in list(model.named_modules()):
        for attribute, chain in strategy_chains(module).items():
            if len(chain) > 1:
                raise ConfigError(
                    f"{path}.{attribute} was parametrized again after apply_strategy ({type(chain[1]).__name__}); end "
                    "that first with torch.nn.utils.parametrize.remove_parametrizations, or before apply_strategy."
                )
            getattr(module, attribute)  # one that cannot be computed fails before anything is changed
            planned.append((module, attribute, chain[0].order))
    for module, attribute, order in planned:
        _remove(module, attribute, order, keep=True)
    for inner in inners:
        applied: Applied = vars(inner)[APPLIED]
        for handle in applied.handles:
            handle.remove()
        named = {unwrapped(name): parameter for name, parameter in inner.named_parameters()}
        for name in applied.frozen:
            if inner is uncompiled(model) and unwrapped(name) in named:  # else what wraps the model decides
                named[unwrapped(name)].requires_grad_(True)
        delattr(inner, APPLIED)
    return model


def applied_modules(model: nn.Module) -> list[nn.Module]:
    """Return the models, of all that `model` holds, that have a strategy."""
    return [module for module in model.modules() if isinstance(vars(module).get(APPLIED), Applied)]


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile's wrapper, which would forward attributes to it."""
    while "_orig_mod" in model._modules:
        model = model.get_submodule("_orig_mod")
    return model


def strategy_chains(module: nn.Module) -> dict[str, Any]:
    """Return the parametrizations of a module's own parameters that begin with the strategy's, by attribute."""
    chains: Any = module._modules.get("parametrizations")  # getattr would reach through a wrapper
    return {
        name: chain
        for name, chain in (chains.items() if isinstance(chains, nn.ModuleDict) else ())
        if isinstance(chain, parametrize.ParametrizationList) and isinstance(chain[0], (ScaledWeight, ScaledGamma))
    }


def _check_complete(model: nn.Module, args: Any) -> None:
    """Refuse to train without the scale vectors of a module that another one replaced.

    Raises:
        ConfigError: vectors are lost
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    present: set[str] = set()
    seen: set[nn.Module] = set()
    waiting: list[nn.Module] = [model]
    while waiting:  # runs at every training step: skips what is below the vectors, unlike model.modules()
        module = waiting.pop()
        seen.add(module)
        if isinstance(module, (ScaledWeight, ScaledGamma, OutputNorm)):
            present.add(module.site)
        else:
            waiting += [child for child in module._modules.values() if child is not None and child not in seen]
    if lost := sorted(vars(model)[APPLIED].sites - present):
        raise ConfigError(
            f"{lost[0]} has lost its scale vectors: another module replaced it, as in resize_token_embeddings; call "
            "fold_applied(model), then apply_strategy again."
        )


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


def _guard_state_dict(model: nn.Module, name: str) -> list[Any]:
    """Add an empty tensor under `name`, which the model has no longer, to its saved states; drop it on loading.

    No plain model takes that shape. Without it, transformers would load such a state with random numbers in place of
    every scaled weight, and only list their names.
    """

    def save(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[prefix + name] = torch.zeros(0)

    def load(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state.pop(prefix + name, None)

    return [model.register_state_dict_post_hook(save), model.register_load_state_dict_pre_hook(load)]
