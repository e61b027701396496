"""The optimizer's settings and its construction from parameter groups."""

from dataclasses import dataclass

import torch

from lightning_sv.optim.groups import ParameterGroup


@dataclass(frozen=True)
class OptimConfig:
    """AdamW as in the paper (Appendix B.1): betas (0.9, 0.95), weight decay 0.1.

    Attributes:
        name: the optimizer; 'adamw'.
        lr: peak learning rate; null for the paper's tuned value for this model, optimizer, schedule
            and strategy (lightning_sv/optim/tuned.py).
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay of the groups that decay.
    """

    name: str = "adamw"
    lr: float | None = None
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        if self.name != "adamw":
            raise ValueError(f"model.optim.name is {self.name!r}; known: adamw")
        if self.lr is not None and self.lr <= 0:
            raise ValueError(f"model.optim.lr is {self.lr}; it must be positive.")
        for key in ("beta1", "beta2"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f"model.optim.{key} is {getattr(self, key)}; it must be in [0, 1).")
        if self.weight_decay < 0:
            raise ValueError(f"model.optim.weight_decay is {self.weight_decay}; it must not be negative.")


def adamw(groups: list[ParameterGroup], config: OptimConfig, lr: float) -> torch.optim.AdamW:
    """Build AdamW with one group a role; `decay` is 0 in the groups that do not decay."""
    return torch.optim.AdamW(
        [
            {
                "params": [member.parameter for member in group.members],
                "weight_decay": config.weight_decay if group.decays else 0.0,
                "role": group.role,
            }
            for group in groups
        ],
        lr=lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )
