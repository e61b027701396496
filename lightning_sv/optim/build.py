"""Registry of optimizers, and the optimizer of a config."""

from collections.abc import Callable
from dataclasses import replace

from torch.optim import SGD, AdamW, Optimizer

from lightning_sv.errors import ConfigError, unknown
from lightning_sv.optim.config import OptimConfig
from lightning_sv.optim.groups import ParameterGroup
from lightning_sv.optim.muon import CompositeOptimizer, Muon


def adamw(groups: list[ParameterGroup], config: OptimConfig, lr: float) -> AdamW:
    """Build AdamW with decoupled decay (arXiv:1711.05101), which is 0 for groups that do not decay."""
    return AdamW(
        [group.options("adamw", config.weight_decay) for group in groups],
        lr=lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def muon(groups: list[ParameterGroup], config: OptimConfig, lr: float) -> CompositeOptimizer:
    """Build Muon for `config.muon_roles` and AdamW for all others (paper, Appendix B.1.2; arXiv:2502.16982).

    Both share one peak learning rate: 0.2 sqrt(max(m, n)) gives Muon's update the RMS of AdamW's.
    """
    matrices = [group.options("muon", config.weight_decay) for group in groups if group.role in config.muon_roles]
    parts: list[Optimizer] = [Muon(matrices, lr, config.muon_momentum, config.ns_dtype)]
    rest = [group for group in groups if group.role not in config.muon_roles]
    if rest:
        parts.append(adamw(rest, config, lr))
    return CompositeOptimizer(parts)


def sgd(groups: list[ParameterGroup], config: OptimConfig, lr: float) -> SGD:
    """Build SGD with the momentum `beta1`: m = beta1 m + g + weight_decay p, p = p - lr m."""
    return SGD([group.options("sgd", config.weight_decay) for group in groups], lr=lr, momentum=config.beta1)


Builder = Callable[[list[ParameterGroup], OptimConfig, float], Optimizer]
#: name -> builder(groups, config, peak learning rate); every param_group has `role` and `kind`
OPTIMIZERS: dict[str, Builder] = {"adamw": adamw, "muon": muon, "sgd": sgd}


def builder_of(name: str) -> Builder:
    """Return the builder of an optimizer.

    Raises:
        ConfigError: the name is unknown
    """
    if name not in OPTIMIZERS:
        raise ConfigError(unknown("model.optim.name", name, OPTIMIZERS))
    return OPTIMIZERS[name]


def configured_groups(groups: list[ParameterGroup], config: OptimConfig, lr: float) -> list[ParameterGroup]:
    """Return the groups with the settings of their roles, as `build_optimizer` uses them.

    Raises:
        ConfigError: the optimizer is unknown, or the settings name a role without parameters, or a weight decay of
            scale vectors that do not decay
    """
    builder_of(config.name)
    roles = [group.role for group in groups]
    for key, named in (
        ("undecayed", config.undecayed),
        ("muon_roles", config.muon_roles * (config.name == "muon")),
        ("lr_factor_by_role", config.lr_factor_by_role),
        ("weight_decay_by_role", config.weight_decay_by_role),
        ("clip_by_role", config.clip_by_role),
    ):
        if absent := [role for role in named if role not in roles]:
            raise ConfigError(
                f"model.optim.{key} names {absent[0]!r}; expected roles with trained parameters: {' '.join(roles)}."
            )
    return [_by_role(group, config, lr) for group in groups]


def build_optimizer(groups: list[ParameterGroup], config: OptimConfig, lr: float) -> Optimizer:
    """Build the optimizer of `config`; parameters may be on the meta device.

    Args:
        groups: the trained parameters by role
        config: name and settings of the optimizer
        lr: peak learning rate of all groups

    Raises:
        ConfigError: as `configured_groups`
    """
    return builder_of(config.name)(configured_groups(groups, config, lr), config, lr)


def _by_role(group: ParameterGroup, config: OptimConfig, lr: float) -> ParameterGroup:
    role, overrides = group.role, {}
    if role in config.lr_factor_by_role:
        overrides["lr"] = lr * config.lr_factor_by_role[role]
    if role in config.weight_decay_by_role:
        if not group.decays:
            raise ConfigError(
                f"model.optim.weight_decay_by_role has {role}, but these scale vectors do not decay under model.scale. "
                "Add wd to the strategy, or remove the entry."
            )
        overrides["weight_decay"] = config.weight_decay_by_role[role]
    return replace(group, decays=group.decays and role not in config.undecayed, own=overrides)
