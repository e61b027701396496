"""Settings of the optimizer, the registry of optimizers, and the optimizer of given settings."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.optim import SGD, AdamW, Optimizer

from lightning_sv.errors import ConfigError, expect, expect_known, expect_types
from lightning_sv.optim.groups import MATRIX_ROLES, PARAMETER_ROLES, ParameterGroup
from lightning_sv.optim.muon import CompositeOptimizer, Muon
from lightning_sv.own_code import find

PREFIX = "model.optim"
NS_DTYPES = ("bfloat16", "float32", "float64")
POSITIVE = "a finite number above 0."
NOT_NEGATIVE = "a finite number of at least 0."


@dataclass(frozen=True)
class OptimConfig:
    """Settings of the optimizer; the defaults follow the paper (Appendix B.1).

    Attributes:
        name: the optimizer: 'adamw'; 'muon' for the matrices inside blocks and AdamW for the rest;
            'sgd'; or 'package.module:Name' of your own builder, see `OPTIMIZERS`
        lr: peak learning rate of all parameters; null for the paper's tuned value for this
            model, optimizer, schedule and strategy (conf/tuned/learning_rates.yaml)
        beta1: decay of AdamW's first moment, or SGD's momentum
        beta2: decay of AdamW's second moment
        eps: added to the root of AdamW's second moment
        weight_decay: decay of the groups that decay; decoupled from the gradient except for SGD
        undecayed: roles without decay: any of matrix, router, head and embedding; by default all
            decay, because the paper does not specify it. Scale vectors decay according to the
            strategy
        lr_factor_by_role: factor of `lr` per role, e.g. {embedding: 0.1, input: 2}; the roles are
            router, head, embedding, input and output, and matrix always uses `lr`
        weight_decay_by_role: weight decay of a role that decays, e.g. {input: 0.002};
            `weight_decay` is the default
        clip_by_role: maximum gradient norm of a single role, e.g. {input: 1.0, output: .inf}; such
            a role does not count towards trainer.gradient_clip_val
        muon_roles: matrix roles updated by Muon; we read the paper's "2D matrix blocks in
            Transformer layers" as matrix only, so that AdamW updates the router of a mixture of
            experts
        muon_momentum: Muon's Nesterov momentum
        ns_dtype: dtype of Muon's Newton-Schulz iteration: 'bfloat16', or 'float32' or 'float64' for
            exact comparisons
    """

    name: str = "adamw"
    lr: float | None = None
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    undecayed: list[str] = field(default_factory=list)
    lr_factor_by_role: dict[str, float] = field(default_factory=dict)
    weight_decay_by_role: dict[str, float] = field(default_factory=dict)
    clip_by_role: dict[str, float] = field(default_factory=dict)
    muon_roles: list[str] = field(default_factory=lambda: ["matrix"])
    muon_momentum: float = 0.95
    ns_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        expect_types(PREFIX, self)
        if ":" not in self.name:
            find(OPTIMIZERS, self.name, f"{PREFIX}.name")
        expect_known(f"{PREFIX}.ns_dtype", self.ns_dtype, NS_DTYPES)
        self._check_matrix_roles()
        self._check_values_by_role()
        self._check_numbers()

    def _check_matrix_roles(self) -> None:
        for key in ("undecayed", "muon_roles"):
            for role in getattr(self, key):
                if role not in MATRIX_ROLES:
                    hint = "model.scale sets the decay of scale vectors."
                    expected = f"roles of {' '.join(MATRIX_ROLES)}. {hint}"
                    raise ConfigError(f"{PREFIX}.{key} has {role!r}; expected {expected}")
        expect(len(self.muon_roles) > 0, f"{PREFIX}.muon_roles", [], "a role, or name adamw.")
        conflicts = set(self.undecayed) & set(self.weight_decay_by_role)
        if conflicts:
            both = f"{PREFIX}.undecayed and {PREFIX}.weight_decay_by_role"
            raise ConfigError(f"{both} have {min(conflicts)}; remove it from one of them.")

    def _check_values_by_role(self) -> None:
        if "matrix" in self.lr_factor_by_role:
            raise ConfigError(f"{PREFIX}.lr_factor_by_role has matrix; set {PREFIX}.lr instead.")
        for role, value in self.lr_factor_by_role.items():
            is_positive = 0 < value < math.inf
            _check_of_role("lr_factor_by_role", role, value, is_positive, POSITIVE)
        for role, value in self.weight_decay_by_role.items():
            is_decay = 0 <= value < math.inf
            _check_of_role("weight_decay_by_role", role, value, is_decay, NOT_NEGATIVE)
        for role, value in self.clip_by_role.items():
            _check_of_role("clip_by_role", role, value, value > 0, "a number above 0.")

    def _check_numbers(self) -> None:
        if self.lr is not None:
            expect(0 < self.lr < math.inf, f"{PREFIX}.lr", self.lr, POSITIVE)
        for key in ("beta1", "beta2", "muon_momentum"):
            value = getattr(self, key)
            expect(0 <= value < 1, f"{PREFIX}.{key}", value, "a number in [0, 1).")
        expect(0 < self.eps < math.inf, f"{PREFIX}.eps", self.eps, POSITIVE)
        decay = self.weight_decay
        expect(0 <= decay < math.inf, f"{PREFIX}.weight_decay", decay, NOT_NEGATIVE)


def _check_of_role(key: str, role: str, value: float, fits: bool, expected: str) -> None:
    expect_known(f"role in {PREFIX}.{key}", role, PARAMETER_ROLES)
    expect(fits, f"{PREFIX}.{key}.{role}", value, expected)


def adamw(groups: list[ParameterGroup], config: OptimConfig, lr: float) -> AdamW:
    """Build AdamW with decoupled decay (arXiv:1711.05101), 0 for groups that do not decay."""
    options = _options("adamw", groups, config)
    betas = (config.beta1, config.beta2)
    return AdamW(options, lr=lr, betas=betas, eps=config.eps, fused=True)


def muon(groups: list[ParameterGroup], config: OptimConfig, lr: float) -> CompositeOptimizer:
    """Build Muon for `config.muon_roles` and AdamW for all others.

    Paper, Appendix B.1.2; arXiv:2502.16982. Both share one peak learning rate: 0.2 sqrt(max(m, n))
    gives Muon's update the RMS of AdamW's.
    """
    with_muon: list[ParameterGroup] = []
    with_adamw: list[ParameterGroup] = []
    for group in groups:
        if group.role in config.muon_roles:
            with_muon.append(group)
        else:
            with_adamw.append(group)

    options = _options("muon", with_muon, config)
    parts: list[Optimizer] = [Muon(options, lr, config.muon_momentum, config.ns_dtype)]
    if with_adamw:
        parts.append(adamw(with_adamw, config, lr))
    return CompositeOptimizer(parts)


def sgd(groups: list[ParameterGroup], config: OptimConfig, lr: float) -> SGD:
    """Build SGD with the momentum `beta1`: m = beta1 m + g + weight_decay p, p = p - lr m."""
    return SGD(_options("sgd", groups, config), lr=lr, momentum=config.beta1)


def _options(kind: str, groups: list[ParameterGroup], config: OptimConfig) -> list[dict[str, Any]]:
    return [group.options(kind, config.weight_decay) for group in groups]


Builder = Callable[[list[ParameterGroup], OptimConfig, float], Optimizer]
#: name -> builder(groups, config, peak learning rate); param_groups are made by
#: `ParameterGroup.options`
OPTIMIZERS: dict[str, Builder] = {"adamw": adamw, "muon": muon, "sgd": sgd}


def configured_groups(
    groups: list[ParameterGroup], config: OptimConfig, lr: float
) -> list[ParameterGroup]:
    """Return the groups with the settings of their roles, as `build_optimizer` uses them.

    Raises:
        ConfigError: the optimizer is unknown, or the settings name a role without parameters or a
            weight decay of scale vectors that do not decay
    """
    find(OPTIMIZERS, config.name, f"{PREFIX}.name")
    _check_roles_exist(config, [group.role for group in groups])
    return [_configured(group, config, lr) for group in groups]


def _check_roles_exist(config: OptimConfig, roles: Sequence[str]) -> None:
    """Raise ConfigError if a setting names a role without trained parameters."""
    keys = ["undecayed", "lr_factor_by_role", "weight_decay_by_role", "clip_by_role"]
    if config.name == "muon":
        keys.append("muon_roles")
    for key in keys:
        for role in getattr(config, key):
            if role not in roles:
                expected = f"roles with trained parameters: {' '.join(roles)}."
                raise ConfigError(f"{PREFIX}.{key} names {role!r}; expected {expected}")


def build_optimizer(groups: list[ParameterGroup], config: OptimConfig, lr: float) -> Optimizer:
    """Build the optimizer of `config`; parameters may be on the meta device.

    Args:
        groups: the trained parameters by role
        config: name and settings of the optimizer
        lr: peak learning rate of all groups

    Raises:
        ConfigError: as `configured_groups`; or your own builder cannot be imported, or makes groups
            without a role
    """
    builder = find(OPTIMIZERS, config.name, f"{PREFIX}.name")
    optimizer = builder(configured_groups(groups, config, lr), config, lr)
    for group in optimizer.param_groups:
        has_role = {"role", "kind"} <= group.keys()
        expected = "groups made by ParameterGroup.options."
        expect(has_role, f"a group of {config.name}", "without role or kind", expected)
    return optimizer


def _configured(group: ParameterGroup, config: OptimConfig, lr: float) -> ParameterGroup:
    """Return the group with the settings of its role."""
    role = group.role
    overrides = {}
    if role in config.lr_factor_by_role:
        overrides["lr"] = lr * config.lr_factor_by_role[role]
    if role in config.weight_decay_by_role:
        if not group.decays:
            why = "but these scale vectors do not decay under model.scale"
            hint = "Use wd as its word of decay, or remove the entry."
            raise ConfigError(f"{PREFIX}.weight_decay_by_role has {role}, {why}. {hint}")
        overrides["weight_decay"] = config.weight_decay_by_role[role]
    decays = group.decays and role not in config.undecayed
    return replace(group, decays=decays, own=overrides)
