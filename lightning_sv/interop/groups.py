"""Parameter groups for any optimizer, and parameter names for APIs that need names.

Roles may have been found before the model was wrapped, and its names then differ:

    in the roles                        layers.0.norm.weight
    after torch.compile, DDP, FSDP      module._orig_mod.layers.0.norm.weight

So names are compared without the parts that wrappers add.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from lightning_sv.errors import ConfigError, expect
from lightning_sv.own_code import find
from lightning_sv.roles import ModelParameter, Roles, weight_decay_roles
from lightning_sv.scale.strategy import DECAYS

#: name parts that DDP, torch.compile, FSDP and activation checkpointing add
WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
T = TypeVar("T")


def param_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float,
    policy: str | None = None,
    example: Any = None,
    roles: Roles | None = None,
) -> list[dict[str, Any]]:
    """Return optimizer groups: the trained parameters that decay under `policy`, and the others.

    Matrices, routers, heads and embeddings decay. Scale vectors decay if the policy includes their
    role ('iwd': the input side only), multipliers like the output side. Biases and the rest never
    decay.

    Args:
        model: any module
        lr: learning rate of both groups
        weight_decay: weight decay of the first group; the second has none
        policy: 'wd', 'iwd', 'owd' or 'nowd'; None for that of the strategy that `apply_strategy`
            applied, and for 'iwd', the paper's choice, without a strategy
        example: example inputs of the model, see `weight_decay_roles`
        roles: result of `weight_decay_roles`, made after `apply_strategy` or `fold_applied` and
            before wrapping; also on fake tensors, or with given roles

    Raises:
        ConfigError: as `weight_decay_roles`; or `roles` belong to a different model

    Warns:
        UserWarning: scale vectors, also those of a plain model's norms, have 16 bits
    """
    decayed = set(decayed_names(model, policy, example, roles))
    with_decay: list[nn.Parameter] = []
    without: list[nn.Parameter] = []
    for name, parameter in _trained(model):
        group = with_decay if name in decayed else without
        group.append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": with_decay, "lr": lr, "weight_decay": weight_decay},
        {"params": without, "lr": lr, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the names and parameters that require a gradient."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, parameter


def decayed_names(
    model: nn.Module, policy: str | None = None, example: Any = None, roles: Roles | None = None
) -> list[str]:
    """Return the names of the trained parameters that decay.

    Arguments, errors and warnings are those of `param_groups`.

    Raises:
        ConfigError: as `param_groups`
    """
    if policy is None:
        policy = _applied_policy(model)
    find(DECAYS, policy, "policy")  # before the trace, which takes seconds
    parameters = _trained_parameters(model, example, roles)
    _warn_of_short_vectors(model, parameters)
    return [name for name, parameter in parameters.items() if parameter.decays(policy)]


def _warn_of_short_vectors(model: nn.Module, parameters: Mapping[str, ModelParameter]) -> None:
    """Warn if scale vectors have 16 bits or less.

    Their entries are about 1, and steps are smaller than the gaps between numbers.
    """
    for name, parameter in parameters.items():
        if parameter.role not in ("input", "output"):
            continue
        dtype = model.get_parameter(name).dtype
        if dtype.itemsize < 4:
            gap = f"numbers above 1 are {torch.finfo(dtype).eps:.1g} apart"
            lost = f"{gap}, so most steps of an optimizer are lost"
            hint = "Use float32 weights with bf16-mixed."
            text = f"scale vectors such as {name} are in {dtype}, whose {lost}. {hint}"
            warnings.warn(text, stacklevel=3)
            return


def _trained_parameters(
    model: nn.Module, example: Any, roles: Roles | None
) -> dict[str, ModelParameter]:
    """Return the trained parameters of `model`, by their names in it."""
    if roles is None:
        roles = weight_decay_roles(model, example)
    known = _by_unwrapped((row.name, row) for row in roles.parameters)
    trained = _by_unwrapped((name, name) for name, _ in _trained(model))
    missing = []
    for short, name in trained.items():
        if short not in known:
            missing.append(name)
    if missing:
        what = f"{missing[0]} ({len(missing)} of {len(trained)} names are missing)"
        when = "before wrapping it, and after apply_strategy or fold_applied"
        hint = f"Call weight_decay_roles(model) {when}. Of a LightningModule pass the model inside."
        raise ConfigError(f"roles has no {what}; expected the roles of this model. {hint}")
    return {name: known[short] for short, name in trained.items()}


def _applied_policy(model: nn.Module) -> str:
    """Return the decay of the applied strategies, by default 'iwd'."""
    decays: dict[str, None] = {}
    for module in model.modules():
        applied = vars(module).get("applied_strategy")  # of interop.apply.applied.Applied
        if applied is not None:
            decays[applied.strategy.decay] = None
    wanted = f"one of {' '.join(decays)}, because the strategies inside differ."
    expect(len(decays) <= 1, "policy", None, wanted)
    return next(iter(decays), "iwd")


def _by_unwrapped(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Return name without wrappers -> value.

    Raises:
        ConfigError: two names are equal without wrappers
    """
    by_short: dict[str, T] = {}
    for name, value in named:
        short = unwrapped(name)
        if short in by_short:
            what = "roles or the model has names that differ in parts of wrappers alone"
            raise ConfigError(f"{what}; expected the roles of the model as it is now.")
        by_short[short] = value
    return by_short


def unwrapped(name: str) -> str:
    """Return a name without the parts that wrappers add."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    return ".".join(parts)
