"""Tables of an optimizer: its groups, and the parameters of a model."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_sv.optim.groups import SCALE_ROLES, parameter_roles


def group_table(optimizer: Optimizer) -> list[list[str]]:
    """Return rows (role, tensors, parameters, optimizer, peak lr, weight decay) per group."""
    rows = []
    for group in optimizer.param_groups:
        parameters = group["params"]
        scalars = sum(parameter.numel() for parameter in parameters)
        counts = [f"{len(parameters):,}", f"{scalars:,}"]
        role = group["role"]
        name = f"{role} scale" if role in SCALE_ROLES else role
        rows.append([name, *counts, *_settings(group)])
    return rows


def _settings(group: Mapping[str, Any]) -> list[str]:
    return [group["kind"], f"{group['lr']:g}", f"{group['weight_decay']:g}"]


def parameter_table(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Return rows (parameter, shape, role, optimizer, peak lr, weight decay).

    The optimizer is 'frozen' if the parameter is not trained.
    """
    settings_of: dict[int, list[str]] = {}
    for group in optimizer.param_groups:
        settings_of |= dict.fromkeys(map(id, group["params"]), _settings(group))

    rows = []
    for named in parameter_roles(model):
        shape = "x".join(map(str, named.parameter.shape))
        settings = settings_of.get(id(named.parameter), ["frozen", "0", "0"])
        rows.append([named.name, shape, named.role, *settings])
    return rows
