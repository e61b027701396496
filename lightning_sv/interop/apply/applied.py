"""State of a model with an applied strategy, its checks, saving and folding."""

import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import starmap, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_sv.errors import ConfigError, expect
from lightning_sv.interop.apply.sites import SiteMatrix
from lightning_sv.interop.apply.weights import Scaled, output_norm_hook
from lightning_sv.interop.groups import unwrapped
from lightning_sv.roles.example_inputs import check_module
from lightning_sv.scale import ScaleStrategy, ScaleVector
from lightning_sv.scale.vector import Role

#: attribute of an applied model with its `Applied`
APPLIED = "applied_strategy"
#: attribute of a module with the names of its parameters that train again after folding; deep copies have it too
FROZEN = "frozen_by_strategy"
REMOVE = "remove that first with torch.nn.utils.parametrize.remove_parametrizations"
#: classes of sharded modules and parameters
_SHARDED = {"FSDPModule", "FullyShardedDataParallel", "DTensor"}


class Applied(NamedTuple):
    """State of an applied strategy, which folding restores and callbacks read."""

    strategy: ScaleStrategy
    constants: dict[str, float | None]  #: parameter that must not train -> its value, if that is known
    sites: frozenset[str]  #: names of the weights that are computed
    handles: list[Any]  #: handles of the model's hooks
    norms: dict[str, tuple[Role, float]]  #: vector that remains in its norm -> role and origin
    matrices: list[tuple[SiteMatrix, str]]  #: matrices behind norms, and the name in `norms` of the vector they read

    def stored(self, model: nn.Module) -> Iterator[tuple[Role, nn.Parameter]]:
        """Yield role and parameter of the vectors that their norms store as gamma - origin."""
        parameters = _parameters(model)
        return ((role, parameters[name]) for name, (role, _) in self.norms.items() if name in parameters)

    def branches(self, model: nn.Module) -> Iterator[tuple[str, str, Tensor | None, dict[str, Any]]]:
        """Yield (path, suffix, matrix, side -> vector) for matrices behind norms, then for norms without matrices.

        Matrices are (*batch_dims, d_out, d_in). A vector is a ScaleVector, or a function that returns gamma.
        """
        parameters, scaled = _parameters(model), {m.site: m for m in model.modules() if isinstance(m, Scaled)}
        norms = [(name, origin) for name, (_, origin) in self.norms.items() if name in parameters]
        gammas: dict[str, Any] = {name: partial(torch.add, parameters[name], origin) for name, origin in norms}
        gammas |= {name: scaled[name].vector for name in self.norms if name in scaled}
        for matrix, norm in self.matrices:
            path, _, attribute = matrix.weight.rpartition(".")
            original = f"{path}.parametrizations.{attribute}.original".removeprefix(".")
            weight = parameters.get(original, parameters.get(matrix.weight))
            if weight is None:  # a new module replaced it
                continue
            blocks = (weight if matrix.in_axis == weight.ndim - 1 else weight.mT).split(matrix.parts, -2)
            inner: Any = scaled.get(matrix.weight)
            own = [(part.scale_in, part.scale_out) for part in inner.parts] if inner else [(None, None)] * len(blocks)
            for i, (block, (scale_in, scale_out)) in enumerate(zip(blocks, own, strict=True)):
                output: Any = scaled.get(path)
                sides = {"in": scale_in or gammas.get(norm), "out": scale_out or (output and output.scale)}
                yield matrix.weight.removesuffix(".weight"), f"{i}" if len(blocks) > 1 else "", block, sides
        read = {norm for _, norm in self.matrices}
        for name, (role, _) in self.norms.items():
            if name in gammas and name not in read:
                yield name.rpartition(".")[0], "", None, {"in" if role == "input" else "out": gammas[name]}


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by their names, also by those without wrappers and LoRA's layers."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return {unwrapped(name.replace(".base_layer", "")): parameter for name, parameter in named.items()} | named


@torch.no_grad()
def fold_applied(model: nn.Module) -> nn.Module:
    """Fold the scale vectors of an applied strategy into the weights, in place.

    The model then has its own class and keys, and equal outputs; its norms train if the vectors did. Fold before other
    tools read or change the weights, for instance before saving for other code or LoRA's merge.

    Args:
        model: model after `apply_strategy`, or a wrapper of it

    Returns:
        The model itself.

    Raises:
        ConfigError: no strategy was applied; its norms (`dnp`) cannot be folded; the model is sharded; or a weight
            was parametrized again. The model is then unchanged
    """
    check_module(model)
    inners = [module for module in model.modules() if isinstance(vars(module).get(APPLIED), Applied)]
    if not inners:
        raise ConfigError(f"this {type(model).__name__} has no strategy; expected the model of apply_strategy.")
    normed = [path for path, module in model.named_modules() if output_norm_hook in module._forward_hooks.values()]
    if normed:
        what = f"{vars(inners[0])[APPLIED].strategy.placement} normalizes the output of {normed[0]}"
        hint = "Save the model by its state_dict() instead, and LoRA's adapters without a merge."
        raise ConfigError(f"{what} ({len(normed)} such layers), which cannot be folded into a weight. {hint}")
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    kinds |= {type(parameter.data).__name__ for parameter in model.parameters()}
    if sharded := sorted(kinds & _SHARDED):
        expected = "an unsharded one. Load its full state dict into an unsharded model with the same strategy."
        raise ConfigError(f"model is sharded ({sharded[0]}); expected {expected}")
    planned = []
    for path, module in list(model.named_modules()):
        for attribute, parametrizations in scaled_weights(module).items():
            if len(parametrizations) > 1:
                again = f"parametrized again after apply_strategy ({type(parametrizations[1]).__name__})"
                raise ConfigError(f"{path}.{attribute} was {again}; {REMOVE}.")
            planned.append((module, attribute, parametrizations[0].order))
    trained = [_trains(inner) for inner in inners]
    for module, attribute, order in planned:
        remove_parametrization(module, attribute, order, keep=True)
    for inner, trains in zip(inners, trained, strict=True):
        applied: Applied = vars(inner)[APPLIED]
        for handle in applied.handles:
            handle.remove()
        for parameter in _frozen(inner) if trains else ():
            parameter.requires_grad_(True)
        for module in inner.modules():
            vars(module).pop(FROZEN, None)
            if getattr(vars(module).get("save_pretrained"), "func", None) is save_unfolded:
                delattr(module, "save_pretrained")
        delattr(inner, APPLIED)
    return model


def _frozen(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that the strategy froze, also those of layers copied afterwards."""
    marked = [(module, name) for module in model.modules() for name in vars(module).get(FROZEN, ())]
    return [parameter for module, name in marked if (parameter := module._parameters.get(name)) is not None]


def _trains(model: nn.Module) -> bool:
    """Return True if a scale vector trains, or without vectors another weight: LoRA and users freeze all of them."""
    vectors = [p for module in model.modules() if isinstance(module, ScaleVector) for p in module.parameters()]
    own = [p for name, p in model.named_parameters() if not re.search(r"lora_|modules_to_save", name)]
    frozen = {id(parameter) for parameter in _frozen(model)}
    return any(p.requires_grad for p in vectors or own if id(p) not in frozen)


def scaled_weights(module: nn.Module) -> dict[str, Any]:
    """Return the strategy's parametrizations of a module's own parameters, by attribute."""
    found: Any = module._modules.get("parametrizations")  # getattr would look inside a wrapper
    return {
        name: parametrizations
        for name, parametrizations in (found.items() if isinstance(found, nn.ModuleDict) else ())
        if isinstance(parametrizations, parametrize.ParametrizationList) and isinstance(parametrizations[0], Scaled)
    }


def check_complete(model: nn.Module, args: Any) -> None:
    """Check in training that no module with scale vectors was replaced, and that no constant vector trains."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    applied: Applied = vars(model)[APPLIED]
    missing = applied.sites - {module.site for module in model.modules() if isinstance(module, Scaled)}
    modules = {unwrapped(path): module for path, module in model.named_modules()} if missing else {}
    for name in sorted(missing):
        module = modules.get(unwrapped(name.rpartition(".")[0]), nn.Identity())  # a stage of a pipeline lacks modules
        if next(module.parameters(), None) is not None and not any(isinstance(m, Scaled) for m in module.modules()):
            hint = "as in resize_token_embeddings. Call fold_applied(model), then apply_strategy again."
            raise ConfigError(f"{name} has lost its scale vectors, because a new module replaced it, {hint}")
    for name in applied.constants:
        with suppress(AttributeError):  # gone, or a view of FSDP1
            trains = model.get_parameter(name).requires_grad
            expect(not trains, f"{name}.requires_grad", True, "False, because this vector is constant in the strategy.")


def remove_parametrization(owner: nn.Module, attribute: str, order: tuple[str, ...], *, keep: bool) -> None:
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


def save_unfolded(model: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call `save_pretrained` with an empty tensor at the name of a computed weight: loading the plain model then fails.

    Otherwise transformers would load it with random numbers for every scaled weight, and only list their names.
    """

    def add(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[prefix + name] = torch.zeros(0)

    def marked(argument: str, value: Any) -> Any:
        return value if argument != "state_dict" or value is None else {**value, name: torch.zeros(0)}

    names = list(inspect.signature(type(model).save_pretrained).parameters)[1:]
    args = tuple(starmap(marked, zip_longest(names[: len(args)], args)))
    kwargs = {argument: marked(argument, value) for argument, value in kwargs.items()}
    handle = model.register_state_dict_post_hook(add)
    try:
        return type(model).save_pretrained(model, *args, **kwargs)
    finally:
        handle.remove()


def load_unfolded(name: str, module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Remove the tensor of `save_unfolded` from a state dict, before it is loaded."""
    if (saved := state.get(prefix + name)) is not None and not saved.numel():
        del state[prefix + name]


def check_state(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Check the constant vectors of a state dict, before it is loaded; means of several states have rounded ones."""
    applied: Applied = vars(module)[APPLIED]
    given = {unwrapped(key[len(prefix) :]): key for key in state if key.startswith(prefix)}
    named = {unwrapped(name): parameter for name, parameter in module.named_parameters(remove_duplicate=False)}
    fixed = {unwrapped(name): wanted for name, wanted in applied.constants.items()}
    constants = {id(named[name]): wanted for name, wanted in fixed.items() if name in named}
    for name, parameter in named.items():  # a module at several places has several names
        wanted, key = constants.get(id(parameter)), given.get(name, "")
        value: Any = state.get(key)
        if wanted is not None and type(value) in (Tensor, nn.Parameter) and not value.is_meta:
            expected = f"{wanted:g} in all entries. Load a plain model's state before apply_strategy."
            expect(bool(((value - wanted).abs() < 1e-5).all()), name, "a trained vector", expected)
            state[key] = torch.full_like(value, wanted)
