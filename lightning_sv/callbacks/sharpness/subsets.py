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


def parameter_subsets(model: nn.Module) -> Subsets:
    """Return the trained parameters of `model` by name; a role that the model lacks is empty."""
    roles = PARAMETER_ROLES if isinstance(model, Backbone) else ("input", "output")
    by_role: dict[str, list[nn.Parameter]] = {role: [] for role in roles}
    for role, parameter in _roles_of_parameters(model):
        by_role[role].append(parameter)

    subsets = {"all": _trained(model.parameters())}
    for role, parameters in by_role.items():
        name = f"scale_{role}" if role in ("input", "output") else role
        subsets[name] = _trained(parameters)
    return subsets


def _roles_of_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield role and parameter; a shared parameter may come several times."""
    if isinstance(model, Backbone):
        for named in parameter_roles(model):
            yield named.role, named.parameter
        return
    for module in model.modules():
        if isinstance(module, ScaleVector):
            for parameter in module.parameters():
                yield module.role, parameter
    for _, module, applied in applied_strategies(model):
        yield from applied.stored(module)


def _trained(parameters: Iterable[nn.Parameter]) -> tuple[nn.Parameter, ...]:
    """Return the parameters that are trained, each once."""
    return tuple(dict.fromkeys(p for p in parameters if p.requires_grad))
