"""Settings of the optimizer, the registry of optimizers, and the optimizer of given settings."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch.optim import SGD, AdamW, Optimizer

from lightning_sv.errors import ConfigError, expect, expect_known
from lightning_sv.optim.groups import MATRIX_ROLES, PARAMETER_ROLES, ParameterGroup
from lightning_sv.optim.muon import CompositeOptimizer, Muon
from lightning_sv.own_code import find

NS_DTYPES = ("bfloat16", "float32", "float64")


@dataclass(frozen=True)
class OptimConfig:
    """Settings of the optimizer; the defaults follow the paper (Appendix B.1).

    Attributes:
        name: the optimizer: 'adamw'; 'muon' for the matrices inside blocks and AdamW for the rest; 'sgd'; or
            'package.module:Name' of your own builder, see `OPTIMIZERS`
        lr: peak learning rate of all parameters; null for the paper's tuned value for this
            model, optimizer, schedule and strategy (lightning_sv/optim/tuned.py)
        beta1: decay of AdamW's first moment, or SGD's momentum
        beta2: decay of AdamW's second moment
        eps: added to the root of AdamW's second moment
        weight_decay: decay of the groups that decay; decoupled from the gradient except for SGD
        undecayed: roles without decay: any of matrix, router, head and embedding; by default all decay, because the
            paper does not specify it. Scale vectors decay according to the strategy
        lr_factor_by_role: factor of `lr` per role, e.g. {embedding: 0.1, input: 2}; the roles are router, head,
            embedding, input and output, and matrix always uses `lr`
        weight_decay_by_role: weight decay of a role that decays, e.g. {input: 0.002}; `weight_decay` is the default
        clip_by_role: maximum gradient norm of a single role, e.g. {input: 1.0, output: .inf}; such a role does not
            count towards trainer.gradient_clip_val
        muon_roles: matrix roles updated by Muon; we read the paper's "2D matrix blocks in Transformer layers" as
            matrix only, so that AdamW updates the router of a mixture of experts
        muon_momentum: Muon's Nesterov momentum
        ns_dtype: dtype of Muon's Newton-Schulz iteration: 'bfloat16', or 'float32' or 'float64' for exact
            comparisons
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
        if ":" not in self.name:
            find(OPTIMIZERS, self.name, "model.optim.name")
        expect_known("model.optim.ns_dtype", self.ns_dtype, NS_DTYPES)
        for key in ("undecayed", "muon_roles"):
            if unknown_roles := [role for role in getattr(self, key) if role not in MATRIX_ROLES]:
                wanted = f"roles of {' '.join(MATRIX_ROLES)}. model.scale sets the decay of scale vectors."
                raise ConfigError(f"model.optim.{key} has {unknown_roles[0]!r}; expected {wanted}")
        for key in ("lr_factor_by_role", "weight_decay_by_role", "clip_by_role"):
            for role, value in getattr(self, key).items():
                expect_known(f"role in model.optim.{key}", role, PARAMETER_ROLES)
                limit = math.inf if key == "clip_by_role" else 1e12
                fits = 0 < value <= limit or (value == 0 and key == "weight_decay_by_role")
                expect(fits, f"model.optim.{key}.{role}", value, "a positive number.")
        if "matrix" in self.lr_factor_by_role:
            raise ConfigError("model.optim.lr_factor_by_role has matrix; set model.optim.lr instead.")
        if conflicts := set(self.undecayed) & set(self.weight_decay_by_role):
            both = "model.optim.undecayed and model.optim.weight_decay_by_role"
            raise ConfigError(f"{both} have {min(conflicts)}; remove it from one of them.")
        expect(len(self.muon_roles) > 0, "model.optim.muon_roles", [], "a role, or model.optim.name adamw.")
        expect(self.lr is None or self.lr > 0, "model.optim.lr", self.lr, "a number above 0.")
        for key in ("beta1", "beta2", "muon_momentum"):
            value = getattr(self, key)
            expect(0 <= value < 1, f"model.optim.{key}", value, "a number in [0, 1).")
        expect(self.eps > 0, "model.optim.eps", self.eps, "a number above 0.")
        expect(self.weight_decay >= 0, "model.optim.weight_decay", self.weight_decay, "0 or more.")


def adamw(groups: list[ParameterGroup], config: OptimConfig, lr: float) -> AdamW:
    """Build AdamW with decoupled decay (arXiv:1711.05101), which is 0 for groups that do not decay."""
    options = [group.options("adamw", config.weight_decay) for group in groups]
    return AdamW(options, lr=lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


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
#: name -> builder(groups, config, peak learning rate); param_groups are made by `ParameterGroup.options`
OPTIMIZERS: dict[str, Builder] = {"adamw": adamw, "muon": muon, "sgd": sgd}


def configured_groups(groups: list[ParameterGroup], config: OptimConfig, lr: float) -> list[ParameterGroup]:
    """Return the groups with the settings of their roles, as `build_optimizer` uses them.

    Raises:
        ConfigError: the optimizer is unknown, or the settings name a role without parameters or a weight decay of scale
            vectors that do not decay
    """
    find(OPTIMIZERS, config.name, "model.optim.name")
    roles = [group.role for group in groups]
    for key, named in (
        ("undecayed", config.undecayed),
        ("muon_roles", config.muon_roles * (config.name == "muon")),
        ("lr_factor_by_role", config.lr_factor_by_role),
        ("weight_decay_by_role", config.weight_decay_by_role),
        ("clip_by_role", config.clip_by_role),
    ):
        if absent := [role for role in named if role not in roles]:
            wanted = f"roles with trained parameters: {' '.join(roles)}."
            raise ConfigError(f"model.optim.{key} names {absent[0]!r}; expected {wanted}")
    return [_by_role(group, config, lr) for group in groups]


def build_optimizer(groups: list[ParameterGroup], config: OptimConfig, lr: float) -> Optimizer:
    """Build the optimizer of `config`; parameters may be on the meta device.

    Args:
        groups: the trained parameters by role
        config: name and settings of the optimizer
        lr: peak learning rate of all groups

    Raises:
        ConfigError: as `configured_groups`; or your own builder cannot be imported, or makes groups without a role
    """
    builder = find(OPTIMIZERS, config.name, "model.optim.name")
    optimizer = builder(configured_groups(groups, config, lr), config, lr)
    made = all({"role", "kind"} <= group.keys() for group in optimizer.param_groups)
    expect(made, f"a group of {config.name}", "without role or kind", "groups made by ParameterGroup.options.")
    return optimizer


def _by_role(group: ParameterGroup, config: OptimConfig, lr: float) -> ParameterGroup:
    role, overrides = group.role, {}
    if role in config.lr_factor_by_role:
        overrides["lr"] = lr * config.lr_factor_by_role[role]
    if role in config.weight_decay_by_role:
        if not group.decays:
            why = "but these scale vectors do not decay under model.scale. Add wd to it, or remove the entry."
            raise ConfigError(f"model.optim.weight_decay_by_role has {role}, {why}")
        overrides["weight_decay"] = config.weight_decay_by_role[role]
    return replace(group, decays=group.decays and role not in config.undecayed, own=overrides)
