"""AdamW with one parameter group per role."""

import torch

from lightning_sv.optim.config import OptimConfig
from lightning_sv.optim.groups import ParameterGroup


def adamw(groups: list[ParameterGroup], config: OptimConfig, lr: float) -> torch.optim.AdamW:
    """Build AdamW with decoupled decay (arXiv:1711.05101), which is 0 for groups that do not decay."""
    return torch.optim.AdamW(
        [group.options("adamw", config.weight_decay) for group in groups],
        lr=lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )
