"""Named subsets of a model's parameters.

all                                      every trained parameter
matrix, router, head, embedding,         by role; of other models than our backbone only the roles
scale_input, scale_output                of scale vectors are known
layer0, layer1, ...                      by block
q_proj, ...                              by matrix, with its scale vectors, in all blocks
attn_norm, ...                           by norm, its scale vectors in all blocks

Each function yields pairs of a name and parameters, and a name may come several times. `trained`
collects them.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from torch import nn

from lightning_sv.callbacks.branches import applied_strategies
from lightning_sv.nn import Backbone
from lightning_sv.optim import PARAMETER_ROLES, parameter_roles
from lightning_sv.scale import BranchGroup, RMSNorm, ScaledLinear, ScaleVector

#: subset -> its parameters; subsets of roles that a model lacks are empty
Subsets = dict[str, tuple[nn.Parameter, ...]]
#: name of a subset, and parameters that it contains
Member = tuple[str, Iterable[nn.Parameter]]


def parameter_subsets(model: nn.Module) -> Subsets:
    """Return the trained parameters of `model` by name; a role that the model lacks is empty."""
    subsets: Subsets = dict.fromkeys(["all", *known_roles(model)], ())
    subsets |= trained([("all", model.parameters()), *members_by_role(model)])
    places = trained([*members_by_place(model), *applied_vectors(model)])
    for name, members in places.items():
        is_role = name in subsets  # such as `router`, which keeps that meaning
        if members and not is_role:
            subsets[name] = members
    return subsets


def trained(members: Iterable[Member]) -> Subsets:
    """Return the trained parameters of each name, each once."""
    subsets: dict[str, dict[nn.Parameter, None]] = defaultdict(dict)
    for name, parameters in members:
        subsets[name] |= dict.fromkeys(p for p in parameters if p.requires_grad)
    return {name: tuple(parameters) for name, parameters in subsets.items()}


def known_roles(model: nn.Module) -> list[str]:
    """Return the names of the roles that are known of a model."""
    roles = PARAMETER_ROLES if isinstance(model, Backbone) else ("input", "output")
    return list(map(_role_name, roles))


def members_by_role(model: nn.Module) -> Iterator[Member]:
    """Yield the parameters whose role is known."""
    if isinstance(model, Backbone):
        for named in parameter_roles(model):
            yield _role_name(named.role), [named.parameter]
        return
    for module in model.modules():
        if isinstance(module, ScaleVector):
            yield _role_name(module.role), module.parameters()
    for _, module, applied in applied_strategies(model):
        for role, parameter in applied.stored(module):
            yield _role_name(role), [parameter]


def members_by_place(model: nn.Module) -> Iterator[Member]:
    """Yield the parameters of each block, and of the matrices and norms of each name."""
    for path, module in model.named_modules():
        parent, _, name = path.rpartition(".")
        if parent == "layers":
            yield f"layer{name}", module.parameters()
        elif isinstance(module, BranchGroup):
            yield from _members_of_group(module)
        elif _has_own_subset(module, name):
            yield name, module.parameters()


def _has_own_subset(module: nn.Module, name: str) -> bool:
    """Return True for a matrix, and for a norm that is not inside a `BranchGroup`."""
    if isinstance(module, RMSNorm):
        return name != "norm"
    return isinstance(module, ScaledLinear | nn.Linear)


def _members_of_group(group: BranchGroup) -> Iterator[Member]:
    """Yield the vectors of a norm under its name, and under that of each branch that reads them."""
    yield group.site, group.norm.parameters()
    for name in group.names:
        for vector in group.vectors(name):
            if vector is not None:
                yield name, vector.parameters()


def applied_vectors(model: nn.Module) -> Iterator[Member]:
    """Yield the name of a matrix that `apply_strategy` changed, and parameters of its vectors."""
    for _, module, applied in applied_strategies(model):
        for branch in applied.branches(module):
            if branch.matrix is None:  # a norm
                continue
            _, _, name = branch.path.rpartition(".")
            for vector in branch.sides.values():
                yield name, _parameters_of(vector)


def _parameters_of(vector: object) -> Iterable[nn.Parameter]:
    if isinstance(vector, nn.Module):
        return vector.parameters()
    # a vector that stays in its norm is a function of the norm's parameter
    arguments: tuple[nn.Parameter, ...] = getattr(vector, "args", ())
    return arguments[:1]


def _role_name(role: str) -> str:
    return f"scale_{role}" if role in ("input", "output") else role
