"""SGD with momentum and one parameter group per role."""

import torch

from lightning_sv.optim.config import OptimConfig
from lightning_sv.optim.groups import ParameterGroup


def sgd(groups: list[ParameterGroup], config: OptimConfig, lr: float) -> torch.optim.SGD:
    """Build SGD with the momentum `beta1`: m = beta1 m + g + weight_decay p, p = p - lr m."""
    return torch.optim.SGD(
        [group.options("sgd", config.weight_decay) for group in groups], lr=lr, momentum=config.beta1
    )
