"""The optimizer's settings, and the table of optimizers they choose from."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch.optim import Optimizer

from lightning_sv.optim.adamw import adamw
from lightning_sv.optim.groups import MATRIX_ROLES, ParameterGroup
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
        undecayed: roles of matrices that do not decay, of matrix, router, head and embedding (the paper does not
            say which do; all, by default). Scale vectors decay as the strategy says.
        muon_roles: roles of matrices that Muon updates; the paper's "2D matrix blocks in Transformer layers" are read
            as matrix alone, which leaves the router of a mixture of experts to AdamW.
        muon_momentum: Muon's Nesterov momentum.
        ns_dtype: arithmetic of Muon's Newton-Schulz iteration: 'bfloat16', or 'float32' or 'float64' for exact
            comparisons.
    """

    name: str = "adamw"
    lr: float | None = None
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    undecayed: list[str] = field(default_factory=list)
    muon_roles: list[str] = field(default_factory=lambda: ["matrix"])
    muon_momentum: float = 0.95
    ns_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for key, known in (("name", OPTIMIZERS), ("ns_dtype", NS_DTYPES)):
            if getattr(self, key) not in known:
                raise ValueError(f"model.optim.{key} is {getattr(self, key)!r}; known: {' '.join(known)}")
        for key in ("undecayed", "muon_roles"):
            if wrong := [role for role in getattr(self, key) if role not in MATRIX_ROLES]:
                raise ValueError(
                    f"model.optim.{key} is {getattr(self, key)!r}, and {wrong[0]!r} is no role of a matrix; known: "
                    f"{' '.join(MATRIX_ROLES)} (which scale vectors decay is a word of model.scale)."
                )
        if not self.muon_roles:
            raise ValueError("model.optim.muon_roles is [], which leaves Muon nothing; use model.optim.name adamw.")
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
        ValueError: the optimizer does not fit the parameters, or the settings name a role that none of them has.
    """
    roles = [group.role for group in groups]
    for key, named in (("undecayed", config.undecayed), ("muon_roles", config.muon_roles * (config.name == "muon"))):
        if absent := [role for role in named if role not in roles]:
            raise ValueError(
                f"model.optim.{key} names {absent[0]!r}, and this model trains no such parameter; it trains: "
                f"{' '.join(roles)}"
            )
    groups = [replace(group, decays=group.decays and group.role not in config.undecayed) for group in groups]
    return OPTIMIZERS[config.name](groups, config, lr)
