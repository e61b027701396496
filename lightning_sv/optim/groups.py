"""Parameter groups by role, which is derived from a parameter's module and not from its name."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sv.errors import ConfigError, expect
from lightning_sv.scale import ScaledLinear, ScaleVector

ParameterRole = Literal["matrix", "router", "head", "embedding", "input", "output"]
PARAMETER_ROLES: tuple[ParameterRole, ...] = ("matrix", "router", "head", "embedding", "input", "output")
#: Roles of scale vectors, whose decay the strategy sets, and of all other parameters.
SCALE_ROLES: frozenset[ParameterRole] = frozenset({"input", "output"})
MATRIX_ROLES = tuple(role for role in PARAMETER_ROLES if role not in SCALE_ROLES)


@dataclass(frozen=True)
class NamedParameter:
    """One trained parameter, its full name and its role."""

    name: str
    role: ParameterRole
    parameter: nn.Parameter


def parameter_roles(model: nn.Module) -> Iterator[NamedParameter]:
    """Yield each parameter of `model` once, with its role.

    matrix, router, head: the weight of a linear map inside a block, before a top-k selection of
    experts, and before the logits; embedding: a lookup table; input, output: the parameters of a
    scale vector, such as alpha and beta.

    Raises:
        ConfigError: the module of a parameter has no known role, for instance a norm with its own weight, or a bias
    """
    vectors = (module for module in model.modules() if isinstance(module, ScaleVector))
    owners = {part: vector for vector in vectors for part in vector.modules()}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            yield NamedParameter(full, _role(full, owners.get(module, module), name), parameter)


def _role(full: str, module: nn.Module, name: str) -> ParameterRole:
    if isinstance(module, ScaleVector):
        return module.role
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, ScaledLinear):
        return module.role
    if isinstance(module, nn.Linear) and name == "weight":
        return "matrix"
    classes = "ScaleVector, ScaledLinear, nn.Linear (no bias) or nn.Embedding"
    raise ConfigError(f"parameter {full} of {type(module).__name__} has no role; make it part of a {classes}.")


@dataclass(frozen=True)
class ParameterGroup:
    """The parameters of one role.

    Attributes:
        role: role of the parameters
        decays: if True, they take part in weight decay
        members: the parameters
        own: entries of the optimizer's group that differ from its defaults: 'lr', 'weight_decay'
    """

    role: ParameterRole
    decays: bool
    members: tuple[NamedParameter, ...]
    own: Mapping[str, float] = field(default_factory=dict)

    def options(self, kind: str, weight_decay: float) -> dict[str, Any]:
        """Return the optimizer's param_group of these parameters.

        Args:
            kind: the update rule: 'adamw', 'muon' or 'sgd'
            weight_decay: weight decay, applied if the group decays
        """
        return {
            "params": [member.parameter for member in self.members],
            "weight_decay": weight_decay if self.decays else 0.0,
            "role": self.role,
            "name": self.role,  # for LearningRateMonitor
            "kind": kind,
            **self.own,
        }


def role_groups(model: nn.Module, decayed_roles: frozenset[str]) -> list[ParameterGroup]:
    """Partition the trained parameters of `model` by role.

    Scale vectors decay if their role is in `decayed_roles` (paper, Section 2.2). Matrices decay, including the
    embedding, the lm_head and the router; the paper does not specify it. `OptimConfig.undecayed` excludes roles.

    Raises:
        ConfigError: a parameter without a role, or a word in place of roles
    """
    wanted = "strategy.decayed_roles, a set of 'input' and 'output'."
    expect(not isinstance(decayed_roles, str), "decayed_roles", repr(decayed_roles), wanted)
    members: dict[str, list[NamedParameter]] = {role: [] for role in PARAMETER_ROLES}
    for named in parameter_roles(model):
        if named.parameter.requires_grad:
            members[named.role].append(named)
    groups = [
        ParameterGroup(role, role not in SCALE_ROLES or role in decayed_roles, tuple(named_parameters))
        for role in PARAMETER_ROLES
        if (named_parameters := members[role])
    ]
    grouped = [id(m.parameter) for group in groups for m in group.members]
    wanted = "parameters of one module each, because each has one role. Untie them."
    expect(len(grouped) == len(set(grouped)), "the model", "one with shared parameters", wanted)
    assert set(grouped) == {id(p) for p in model.parameters() if p.requires_grad}, "not a partition"
    return groups


def matrix_rate(param_groups: Sequence[Mapping[str, Any]]) -> float:
    """Return the learning rate of the matrices, which `OptimConfig.lr_factor_by_role` does not change."""
    return float(next((g["lr"] for g in param_groups if g.get("role") == "matrix"), param_groups[0]["lr"]))


def is_sharded(tensor: Tensor) -> bool:
    """Return True if this process may hold only a part of `tensor` (FSDP2); importing DTensor takes a second."""
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor, by a collective if it is sharded."""
    if not is_sharded(tensor):
        return tensor
    return tensor.full_tensor()  # type: ignore[attr-defined]


def clip_by_role(
    parameters: Iterable[nn.Parameter], optimizer: Optimizer, limit: float, limits: Mapping[str, float]
) -> Tensor:
    """Clip the gradients of each role in `limits` by its own norm, the others by their joint norm.

    Args:
        parameters: the model's parameters, in order
        optimizer: optimizer whose groups have a `role`; groups without one are clipped together
        limit: maximum joint norm
        limits: role -> maximum norm of its gradients

    Returns:
        norm of all gradients before clipping
    """
    role_of = {p: g["role"] for g in optimizer.param_groups if g.get("role") in limits for p in g["params"]}
    parts: dict[str, list[nn.Parameter]] = {}
    for parameter in parameters:
        parts.setdefault(role_of.get(parameter, ""), []).append(parameter)
    norms = [
        full_tensor(nn.utils.clip_grad_norm_(members, limits.get(role, limit), foreach=True).detach())
        for role, members in parts.items()
    ]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def group_table(optimizer: Optimizer) -> list[list[str]]:
    """Return rows (role, tensors, parameters, optimizer, peak lr, weight decay) of the optimizer's groups."""
    rows = []
    for group in optimizer.param_groups:
        role, parameters = group["role"], group["params"]
        if role in SCALE_ROLES:
            role = f"{role} scale"
        elif role == "matrix" and parameters[0].ndim > 2:
            role = "matrix of an expert"
        scalars = sum(parameter.numel() for parameter in parameters)
        row = (role, f"{len(parameters):,}", f"{scalars:,}", group["kind"])
        rows.append([*row, f"{group['lr']:g}", f"{group['weight_decay']:g}"])
    return rows


def parameter_table(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Return rows (parameter, shape, role, optimizer, peak lr, weight decay); 'frozen' if not trained."""
    group_of = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    rows = []
    for named in parameter_roles(model):
        row = [named.name, "x".join(map(str, named.parameter.shape)), named.role]
        group = group_of.get(id(named.parameter))
        settings = (
            ["frozen", "0", "0"] if group is None else [group["kind"], f"{group['lr']:g}", f"{group['weight_decay']:g}"]
        )
        rows.append(row + settings)
    return rows
