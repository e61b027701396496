"""Parameter groups for any optimizer, and names for those that want names."""

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_sv.errors import ConfigError
from lightning_sv.roles import ModelRole, Roles, weight_decay_roles

#: words that DDP, torch.compile, FSDP and activation checkpointing put into the names of what they wrap
WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def param_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float,
    policy: str = "iwd",
    example: Any = None,
    roles: Roles | None = None,
    known: Mapping[str, ModelRole] | None = None,
) -> list[dict[str, Any]]:
    """Return two groups for an optimizer: the trained parameters that decay under `policy`, and those that do not.

    Matrices, routers, heads and embeddings decay; of the scale vectors those of the policy's roles do ('iwd': the
    input side alone, the paper's choice); multipliers as the output side; biases and the rest never.

    Args:
        model: any module
        lr: learning rate of both groups
        weight_decay: weight decay of the first group; the second has none
        policy: 'wd', 'iwd', 'owd' or 'nowd'
        example: what the model is called with, see `weight_decay_roles`
        roles: of these names, where they are known: found before the model was wrapped, or on fake tensors
        known: roles that you know yourself, by name

    Raises:
        ConfigError: as `weight_decay_roles`; `roles` are of another model; or a number is negative or not finite
    """
    for name, value in {"lr": lr, "weight_decay": weight_decay}.items():
        try:
            usable = not isinstance(value, bool) and math.isfinite(value) and value >= 0
        except (TypeError, OverflowError):
            usable = False
        if not usable:
            raise ConfigError(f"{name} is {value!r:.40}; expected a finite number of at least 0.")
    decayed = set(decayed_names(model, policy, example, roles, known))
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in trained if name in decayed], "lr": lr, "weight_decay": weight_decay},
        {"params": [p for name, p in trained if name not in decayed], "lr": lr, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def decayed_names(
    model: nn.Module,
    policy: str = "iwd",
    example: Any = None,
    roles: Roles | None = None,
    known: Mapping[str, ModelRole] | None = None,
) -> list[str]:
    """Names of the trained parameters of `model` that decay under `policy`; the arguments are those of `param_groups`.

    Raises:
        ConfigError: as `param_groups`
    """
    if roles is None:
        roles = weight_decay_roles(model, example, known)
    decays = {parameter.name: parameter.decays(policy) for parameter in roles.parameters}
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    decays |= _of_wrapped(trained, decays)
    if missing := [name for name in trained if name not in decays]:
        raise ConfigError(
            f"the roles are of another model: {missing[0]} is not among them ({len(missing)} of {len(trained)} names); "
            "find them with weight_decay_roles of this model before it is wrapped."
        )
    return [name for name in trained if decays[name]]


def _of_wrapped(names: list[str], decays: Mapping[str, bool]) -> dict[str, bool]:
    """Return the decays of a wrapped model's parameters, as far as their names can be found.

    Words of wrappers are left out. A module that holds the model, such as a LightningModule, puts one path in front of
    all names.

    Args:
        names: names of the wrapped model
        decays: name -> decay, in the model inside
    """
    plain: dict[str, set[bool]] = {}
    for name, decayed in decays.items():
        plain.setdefault(unwrapped(name), set()).add(decayed)
    known = {name: next(iter(found)) for name, found in plain.items() if len(found) == 1}  # two are not one name
    inner = {name: unwrapped(name) for name in names}
    own = {name: decays[name] for name in names if name in decays}
    own = {name: known[short] for name, short in inner.items() if short in known} | own
    words = next(iter(inner.values()), "").split(".")
    for i in range(1, len(words) if len(own) < len(names) else 0):
        path = ".".join([*words[:i], ""])
        found = {name: known.get(short.removeprefix(path)) for name, short in inner.items() if short.startswith(path)}
        within = {name: decayed for name, decayed in found.items() if decayed is not None}
        if len(within) == len(names):
            return within
    return own


def unwrapped(name: str) -> str:
    """Return a name as it was before the model, or a part of it, was wrapped."""
    return ".".join(word for word in name.split(".") if word not in WRAPPERS)
