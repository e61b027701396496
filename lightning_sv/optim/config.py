"""The optimizer's settings, and the table of optimizers they choose from."""

from collections.abc import Callable
from dataclasses import dataclass

from torch.optim import Optimizer

from lightning_sv.optim.adamw import adamw
from lightning_sv.optim.groups import ParameterGroup
from lightning_sv.optim.muon import NS_DTYPES, muon


@dataclass(frozen=True)
class OptimConfig:
    """Settings as in the paper (Appendix B.1): betas (0.9, 0.95), weight decay 0.1, Muon's momentum 0.95.

    Attributes:
        name: the optimizer: 'adamw', or 'muon' for the matrices inside blocks with AdamW for the rest.
        lr: peak learning rate, of Muon and AdamW alike; null for the paper's tuned value for this
            model, optimizer, schedule and strategy (lightning_sv/optim/tuned.py).
        beta1: decay of AdamW's first moment.
        beta2: decay of AdamW's second moment.
        eps: added to the root of AdamW's second moment.
        weight_decay: decoupled decay of the groups that decay.
        muon_momentum: Muon's Nesterov momentum.
        ns_dtype: arithmetic of Muon's Newton-Schulz iteration: 'bfloat16', or 'float32' for exact comparisons.
    """

    name: str = "adamw"
    lr: float | None = None
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    muon_momentum: float = 0.95
    ns_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for key, known in (("name", OPTIMIZERS), ("ns_dtype", NS_DTYPES)):
            if getattr(self, key) not in known:
                raise ValueError(f"model.optim.{key} is {getattr(self, key)!r}; known: {' '.join(known)}")
        if self.lr is not None and self.lr <= 0:
            raise ValueError(f"model.optim.lr is {self.lr}; it must be positive.")
        for key in ("beta1", "beta2", "muon_momentum"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f"model.optim.{key} is {getattr(self, key)}; it must be in [0, 1).")
        if self.eps <= 0:
            raise ValueError(f"model.optim.eps is {self.eps}; it must be positive.")
        if self.weight_decay < 0:
            raise ValueError(f"model.optim.weight_decay is {self.weight_decay}; it must not be negative.")


#: name -> builder(groups, config, peak learning rate); every param_group it makes has `role` and `kind`
OPTIMIZERS: dict[str, Callable[[list[ParameterGroup], OptimConfig, float], Optimizer]] = {
    "adamw": adamw,
    "muon": muon,
}


def build_optimizer(groups: list[ParameterGroup], config: OptimConfig, lr: float) -> Optimizer:
    """Build the optimizer that `config` names; parameters on the meta device do for a check.

    Args:
        groups: the trained parameters by role.
        config: the settings.
        lr: peak learning rate of all groups.

    Raises:
        ValueError: the optimizer does not fit the parameters.
    """
    return OPTIMIZERS[config.name](groups, config, lr)
