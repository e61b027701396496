"""AdamW with one group a role."""

from typing import TYPE_CHECKING

import torch

from lightning_sv.optim.groups import ParameterGroup

if TYPE_CHECKING:  # config.py imports the builders for its table
    from lightning_sv.optim.config import OptimConfig


def adamw(groups: list[ParameterGroup], config: "OptimConfig", lr: float) -> torch.optim.AdamW:
    """AdamW with decoupled decay (arXiv:1711.05101), which is 0 in the groups that do not decay."""
    return torch.optim.AdamW(
        [group.options("adamw", config.weight_decay) for group in groups],
        lr=lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )
