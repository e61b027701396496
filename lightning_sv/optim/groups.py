"""Parameter groups by role: which parameter decays is read from what it is, never from its name."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

from lightning_sv.scale import ScaledLinear, ScaleVector

ParameterRole = Literal["matrix", "router", "head", "embedding", "input", "output"]
PARAMETER_ROLES: tuple[ParameterRole, ...] = ("matrix", "router", "head", "embedding", "input", "output")
#: the roles of scale vectors; all others always decay
SCALE_ROLES: frozenset[ParameterRole] = frozenset({"input", "output"})


@dataclass(frozen=True)
class NamedParameter:
    """One trained parameter, its full name and its role."""

    name: str
    role: ParameterRole
    parameter: nn.Parameter


def parameter_roles(model: nn.Module) -> Iterator[NamedParameter]:
    """Yield each parameter of `model` once, with its role.

    matrix, router, head: the weight of a linear map inside a block, before a top-k choice of
    experts, and before the logits; embedding: a lookup table; input, output: a scale vector's
    parameters, alpha and beta alike.

    Raises:
        ValueError: a parameter whose module has no known role (a norm with a weight of its own, a
            bias): every parameter must have one.
    """
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            yield NamedParameter(full, _role(full, module, name), parameter)


def _role(full: str, module: nn.Module, name: str) -> ParameterRole:
    if isinstance(module, ScaleVector):
        return module.role
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, ScaledLinear):
        return module.role
    if isinstance(module, nn.Linear) and name == "weight":
        return "matrix"
    raise ValueError(
        f"parameter {full} of {type(module).__name__} has no role; make it part of a ScaleVector, "
        "ScaledLinear, nn.Linear (no bias) or nn.Embedding, or extend optim/groups.py."
    )


@dataclass(frozen=True)
class ParameterGroup:
    """The parameters of one role, and whether they decay."""

    role: ParameterRole
    decays: bool
    members: tuple[NamedParameter, ...]

    @property
    def numel(self) -> int:
        """Number of scalars."""
        return sum(member.parameter.numel() for member in self.members)


def parameter_groups(model: nn.Module, decayed_roles: frozenset[str]) -> list[ParameterGroup]:
    """Partition the trained parameters of `model` by role.

    Matrices and embeddings always decay, scale vectors where their role is in `decayed_roles`
    (paper, Section 2.2).

    Raises:
        ValueError: a parameter without a role.
    """
    members: dict[str, list[NamedParameter]] = {role: [] for role in PARAMETER_ROLES}
    for named in parameter_roles(model):
        if named.parameter.requires_grad:
            members[named.role].append(named)
    groups = [
        ParameterGroup(role, role not in SCALE_ROLES or role in decayed_roles, tuple(found))
        for role in PARAMETER_ROLES
        if (found := members[role])
    ]
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    grouped = [id(m.parameter) for group in groups for m in group.members]
    assert len(grouped) == len(set(grouped)) and set(grouped) == trained, "not a partition"
    return groups


def group_table(groups: list[ParameterGroup], lr: float, weight_decay: float, optimizer: str) -> list[list[str]]:
    """Rows (role, tensors, parameters, optimizer, peak lr, weight decay) for a printed table."""
    return [
        [
            f"{group.role} scale" if group.role in SCALE_ROLES else group.role,
            f"{len(group.members):,}",
            f"{group.numel:,}",
            optimizer,
            f"{lr:g}",
            f"{weight_decay if group.decays else 0.0:g}",
        ]
        for group in groups
    ]
