"""Subsets of a model's parameters: by role, by block, by branch."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from lightning_sv.callbacks.branches import applied_strategies
from lightning_sv.nn import Backbone
from lightning_sv.optim import PARAMETER_ROLES, parameter_roles
from lightning_sv.scale import BranchGroup, RMSNorm, ScaledLinear, ScaleVector

#: subset -> its parameters; subsets of roles that a model lacks are empty
Subsets = dict[str, tuple[nn.Parameter, ...]]
#: the same while it is collected: with repetitions, and with frozen parameters
Members = dict[str, list[nn.Parameter]]


def parameter_subsets(model: nn.Module) -> Subsets:
    """Return the trained parameters of `model` by role, layer and branch.

    all; matrix, router, head, embedding, scale_input, scale_output: by role; layer0, ...: one
    block; q_proj, ...: the weights of that name in every block, with their scale vectors;
    attn_norm, ...: the scale vectors of that norm.
    """
    by_role = backbone_roles(model) if isinstance(model, Backbone) else vector_roles(model)
    by_place = modules_by_place(model)
    for name, members in applied_vectors(model):
        by_place[name] += members

    subsets = {name: trained(members) for name, members in by_role.items()}
    for name, members in by_place.items():
        parameters = trained(members)
        is_role = name in by_role  # such as `router`, which keeps that meaning
        if parameters and not is_role:
            subsets[name] = parameters
    return subsets


def backbone_roles(model: Backbone) -> Members:
    """Return all parameters of our backbone, and those of each role."""
    names = ["all", *map(_role_name, PARAMETER_ROLES)]
    roles: Members = {name: [] for name in names}
    for named in parameter_roles(model):
        roles["all"].append(named.parameter)
        roles[_role_name(named.role)].append(named.parameter)
    return roles


def vector_roles(model: nn.Module) -> Members:
    """Return all parameters of any model, and its scale vectors, the only ones of known role."""
    roles: Members = {"all": list(model.parameters()), "scale_input": [], "scale_output": []}
    for module in model.modules():
        if isinstance(module, ScaleVector):
            roles[_role_name(module.role)] += module.parameters()
    for _, module, applied in applied_strategies(model):
        for role, parameter in applied.stored(module):
            roles[_role_name(role)].append(parameter)
    return roles


def modules_by_place(model: nn.Module) -> Members:
    """Return the parameters of each block, and of the matrices and norms of each name."""
    places: Members = defaultdict(list)
    for path, module in model.named_modules():
        parent, _, name = path.rpartition(".")
        if parent == "layers":
            places[f"layer{name}"] += module.parameters()
        elif isinstance(module, BranchGroup):
            _add_group(module, places)
        elif _has_own_subset(module, name):
            places[name] += module.parameters()
    return places


def _has_own_subset(module: nn.Module, name: str) -> bool:
    """Return True for a matrix, and for a norm that is not inside a `BranchGroup`."""
    if isinstance(module, RMSNorm):
        return name != "norm"
    return isinstance(module, ScaledLinear | nn.Linear)


def _add_group(group: BranchGroup, places: Members) -> None:
    """Add the vectors of a norm under its name, and under that of each branch that reads them."""
    places[group.site] += group.norm.parameters()
    for name in group.names:
        for vector in group.vectors(name):
            if vector is not None:
                places[name] += vector.parameters()


def applied_vectors(model: nn.Module) -> Iterator[tuple[str, Iterable[nn.Parameter]]]:
    """Yield the name of a matrix that `apply_strategy` changed, and parameters of its vectors."""
    for _, module, applied in applied_strategies(model):
        for path, _, weight, sides in applied.branches(module):
            if weight is None:  # a norm
                continue
            _, _, name = path.rpartition(".")
            yield name, _parameters_of(sides)


def _parameters_of(sides: Mapping[str, Any]) -> Iterator[nn.Parameter]:
    for vector in sides.values():
        if isinstance(vector, nn.Module):
            yield from vector.parameters()
        else:  # a vector that stays in its norm is a function of the norm's parameter
            yield from getattr(vector, "args", ())[:1]


def trained(members: Iterable[nn.Parameter]) -> tuple[nn.Parameter, ...]:
    """Return the trained parameters, each once."""
    unique = {id(parameter): parameter for parameter in members if parameter.requires_grad}
    return tuple(unique.values())


def _role_name(role: str) -> str:
    return f"scale_{role}" if role in ("input", "output") else role
