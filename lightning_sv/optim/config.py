"""The optimizer's settings."""

from dataclasses import dataclass, field

from lightning_sv.errors import ConfigError, unknown
from lightning_sv.optim.groups import MATRIX_ROLES

NS_DTYPES = ("bfloat16", "float32", "float64")


@dataclass(frozen=True)
class OptimConfig:
    """Settings as in the paper (Appendix B.1): betas (0.9, 0.95), weight decay 0.1, Muon's momentum 0.95.

    Attributes:
        name: the optimizer: 'adamw', or 'muon' for the matrices inside blocks with AdamW for the rest
        lr: peak learning rate, of Muon and AdamW alike; null for the paper's tuned value for this
            model, optimizer, schedule and strategy (lightning_sv/optim/tuned.py)
        beta1: decay of AdamW's first moment
        beta2: decay of AdamW's second moment
        eps: added to the root of AdamW's second moment
        weight_decay: decoupled decay of the groups that decay
        undecayed: roles of matrices that do not decay, of matrix, router, head and embedding (the paper does not
            say which do; all, by default). Scale vectors decay as the strategy says
        muon_roles: roles of matrices that Muon updates; the paper's "2D matrix blocks in Transformer layers" are read
            as matrix alone, which leaves the router of a mixture of experts to AdamW
        muon_momentum: Muon's Nesterov momentum
        ns_dtype: arithmetic of Muon's Newton-Schulz iteration: 'bfloat16', or 'float32' or 'float64' for exact
            comparisons
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
        if self.ns_dtype not in NS_DTYPES:
            raise ConfigError(unknown("model.optim.ns_dtype", self.ns_dtype, NS_DTYPES))
        for key in ("undecayed", "muon_roles"):
            if wrong := [role for role in getattr(self, key) if role not in MATRIX_ROLES]:
                raise ConfigError(
                    f"model.optim.{key} is {getattr(self, key)!r}, and {wrong[0]!r} is no role of a matrix; known: "
                    f"{' '.join(MATRIX_ROLES)} (which scale vectors decay is a word of model.scale)."
                )
        if not self.muon_roles:
            raise ConfigError("model.optim.muon_roles is [], which leaves Muon nothing; use model.optim.name adamw.")
        if self.lr is not None and self.lr <= 0:
            raise ConfigError(f"model.optim.lr is {self.lr}; it must be positive.")
        for key in ("beta1", "beta2", "muon_momentum"):
            if not 0 <= getattr(self, key) < 1:
                raise ConfigError(f"model.optim.{key} is {getattr(self, key)}; it must be in [0, 1).")
        if self.eps <= 0:
            raise ConfigError(f"model.optim.eps is {self.eps}; it must be positive.")
        if self.weight_decay < 0:
            raise ConfigError(f"model.optim.weight_decay is {self.weight_decay}; it must not be negative.")
