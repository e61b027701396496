"""Named subsets of a model's parameters: all, and those of a role.

Roles are matrix, router, head, embedding, scale_input and scale_output. Of other models than our
backbone only the roles of scale vectors are known.
"""

from collections.abc import Iterable, Iterator

from torch import nn

from lightning_sv.callbacks.branches import applied_strategies
from lightning_sv.nn import Backbone
from lightning_sv.optim import PARAMETER_ROLES, parameter_roles
from lightning_sv.scale import ScaleVector

#: subset -> its parameters
Subsets = dict[str, tuple[nn.Parameter, ...]]
#: role of a scale vector -> name of its subset; other subsets have the names of their roles
_NAMES = {"input": "scale_input", "output": "scale_output"}


def parameter_subsets(model: nn.Module) -> Subsets:
    """Return the trained parameters of `model` by name; a role that the model lacks is empty."""
    roles: tuple[str, ...]
    members: list[tuple[str, nn.Parameter]]
    if isinstance(model, Backbone):
        roles = PARAMETER_ROLES
        members = [(named.role, named.parameter) for named in parameter_roles(model)]
    else:
        roles = ("input", "output")
        members = list(_roles_in_vectors(model))
    by_role: dict[str, list[nn.Parameter]] = {role: [] for role in roles}
    for role, parameter in members:
        by_role[role].append(parameter)

    subsets = {"all": _trained(model.parameters())}
    for role, parameters in by_role.items():
        subsets[_NAMES.get(role, role)] = _trained(parameters)
    return subsets


def _roles_in_vectors(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield role and parameter of scale vectors; a shared parameter may come several times."""
    for module in model.modules():
        if isinstance(module, ScaleVector):
            for parameter in module.parameters():
                yield module.role, parameter
    for _, module, applied in applied_strategies(model):
        yield from applied.stored(module)


def _trained(parameters: Iterable[nn.Parameter]) -> tuple[nn.Parameter, ...]:
    """Return the parameters that are trained, each once."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return tuple(dict.fromkeys(trained))
