"""Parameter groups by role, which is derived from a parameter's module and not from its name."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sv.errors import ConfigError, expect, expect_known
from lightning_sv.scale import ScaledLinear, ScaleVector

ParameterRole = Literal["matrix", "router", "head", "embedding", "input", "output"]
PARAMETER_ROLES: tuple[ParameterRole, ...] = get_args(ParameterRole)
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
        ConfigError: the module of a parameter has no known role, for instance a norm with its own
            weight, or a bias
    """
    vector_of: dict[nn.Module, ScaleVector] = {}  # for every module inside a scale vector
    for module in model.modules():
        if isinstance(module, ScaleVector):
            vector_of |= dict.fromkeys(module.modules(), module)
    for path, module in model.named_modules():
        owner = vector_of.get(module, module)
        for name, parameter in module.named_parameters(prefix=path, recurse=False):
            yield NamedParameter(name, _role(name, owner), parameter)


def _role(name: str, module: nn.Module) -> ParameterRole:
    if isinstance(module, ScaleVector | ScaledLinear):
        return module.role
    if isinstance(module, nn.Embedding):
        return "embedding"
    is_weight = name.rpartition(".")[2] == "weight"
    if isinstance(module, nn.Linear) and is_weight:
        return "matrix"
    found = f"parameter {name} of {type(module).__name__} has no role"
    classes = "ScaleVector, ScaledLinear, nn.Linear (no bias) or nn.Embedding"
    raise ConfigError(f"{found}; make it part of a {classes}.")


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

    Scale vectors decay if their role is in `decayed_roles` (paper, Section 2.2). Matrices decay,
    including the embedding, the lm_head and the router; the paper does not specify it.
    `OptimConfig.undecayed` excludes roles.

    Raises:
        ConfigError: a parameter without a role, or a word in place of roles
    """
    is_word = isinstance(decayed_roles, str)
    expected = "strategy.decayed_roles, a set of 'input' and 'output'."
    expect(not is_word, "decayed_roles", repr(decayed_roles), expected)

    trained = [named for named in parameter_roles(model) if named.parameter.requires_grad]
    _check_unique(trained)
    for named in trained:
        expect_known(f"role of {named.name}", named.role, PARAMETER_ROLES)

    decaying = {*MATRIX_ROLES, *decayed_roles}
    groups = []
    for role in PARAMETER_ROLES:
        members = tuple(named for named in trained if named.role == role)
        if members:
            groups.append(ParameterGroup(role, role in decaying, members))
    return groups


def _check_unique(trained: Sequence[NamedParameter]) -> None:
    """Raise ConfigError if a parameter is in several modules, and so may have several roles."""
    unique = {id(named.parameter) for named in trained}
    expected = "parameters of one module each, because each has one role. Untie them."
    expect(len(unique) == len(trained), "the model", "one with shared parameters", expected)


def matrix_rate(param_groups: Sequence[Mapping[str, Any]]) -> float:
    """Return the learning rate of the matrices, which no factor by role changes."""
    for group in param_groups:
        if group.get("role") == "matrix":
            return float(group["lr"])
    return float(param_groups[0]["lr"])


def is_sharded(tensor: Tensor) -> bool:
    """Return True if this process may hold only a part of `tensor` (FSDP2)."""
    # An instance check would import DTensor, which takes a second.
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor, by a collective if it is sharded."""
    if not is_sharded(tensor):
        return tensor
    return tensor.full_tensor()  # type: ignore[attr-defined]


def clip_by_role(
    parameters: Iterable[nn.Parameter],
    optimizer: Optimizer,
    limit: float,
    limits: Mapping[str, float],
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
    role_of: dict[nn.Parameter, str] = {}
    for group in optimizer.param_groups:
        if group.get("role") in limits:
            role_of |= dict.fromkeys(group["params"], group["role"])
    parts: dict[str, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:  # torch's norm of no gradients is on the CPU
            role = role_of.get(parameter, "")
            parts.setdefault(role, []).append(parameter)

    norms = []
    for role, members in parts.items():
        norm = nn.utils.clip_grad_norm_(members, limits.get(role, limit), foreach=True)
        norms.append(full_tensor(norm.detach()))
    if not norms:
        return torch.tensor(0.0)
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack(norms))
