"""Learnable scale vectors gamma, one class per parameterization (paper, Section 3.3).

    direct    gamma                                   the parameter itself
    offset    1 + offset                              Gemma's form
    or        beta * alpha / rms(alpha)               magnitude beta and direction alpha
    er        exp(beta) * exp(alpha - mean(alpha))    the same for the logarithm of gamma

Every class starts at exactly gamma = 1, stores its parameters in float32 and returns gamma in
float32 (float64 parameters give float64). Shapes: `batch_dims` are leading axes, such as the
experts of a mixture that share a module; d is the width of the scaled activation.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lightning_sv.errors import ConfigError
from lightning_sv.scale.shapes import Float
from lightning_sv.scale.state_record import Recorded, RecordedModule

Role = Literal["input", "output"]
ROLES: tuple[Role, ...] = ("input", "output")


class ScaleVector(RecordedModule, ABC):
    """A learnable gamma of shape (*batch_dims, d), equal to 1 at initialization.

    Subclass it for a parameterization: define the parameters, `forward` (parameters -> gamma) and
    `set_gamma` (gamma -> parameters), which model conversion and folding use. State dicts record
    the name of the class; to rename it, set `form` to the old name.

    Args:
        d: width of the activation that gamma multiplies
        role: 'input' if a linear map follows directly (the paper's Input-Norm), otherwise 'output'
            (Output-Norm); weight decay depends on it
        batch_dims: leading axes, for instance (n_expert,)
    """

    #: name in state dicts, because parameters of different formulas may have the same names; by
    #: default the class's
    form: ClassVar[str]
    recorded = Recorded(
        "form",
        name="the parameterization",
        hint="Use that of the weights. If only the name differs, set `form` in the class.",
    )

    def __init_subclass__(cls, **settings: Any):
        super().__init_subclass__(**settings)
        is_of_torch = cls.__module__.startswith("torch.")  # such as the class that FSDP2 makes
        if "form" not in vars(cls) and not is_of_torch:
            cls.form = cls.__name__

    def __init__(self, d: int, role: Role, batch_dims: Sequence[int] = ()):
        super().__init__()
        assert role in ROLES, role
        self.d = d
        self.role = role
        self.batch_dims = tuple(batch_dims)
        #: gamma at initialization; `ScaleOptions.initial_gamma_out` sets it
        self.initial = 1.0

    @abstractmethod
    def forward(self) -> Float[Tensor, "*batch_dims {self.d}"]:
        """Return gamma, shape (*batch_dims, d)."""

    @abstractmethod
    def set_gamma(self, gamma: Float[Tensor, "*batch_dims {self.d}"]) -> None:
        """Set the parameters so that `forward()` is `gamma`, shape (*batch_dims, d).

        Raises:
            ConfigError: the parameterization cannot represent `gamma`
        """

    @property
    def magnitude(self) -> nn.Parameter | None:
        """The parameter `beta`, (*batch_dims, 1), which scales all of gamma; None without one."""
        beta = getattr(self, "beta", None)
        if isinstance(beta, nn.Parameter) and beta.shape == (*self.batch_dims, 1):
            return beta
        return None  # also if a subclass uses the name for something else

    def reset_parameters(self) -> None:
        """Set gamma to its initial value, usually 1, for instance after `to_empty`."""
        device = next(self.parameters()).device
        self.set_gamma(torch.full((*self.batch_dims, self.d), self.initial, device=device))

    def extra_repr(self) -> str:
        """Show width and role in the printed module."""
        shape = "x".join(map(str, (*self.batch_dims, self.d)))
        return f"{shape}, role={self.role}"


def gamma_of(vector: ScaleVector | None) -> Tensor | None:
    """Return the vector's gamma; None, which stands for 1, without a vector."""
    return None if vector is None else vector()


class DirectScale(ScaleVector):
    """gamma itself is the parameter: the standard RMSNorm (paper, eq. 1).

    Implicit preconditioner of gamma's flow: P = I.
    """

    form = "direct"

    def __init__(self, d: int, role: Role, batch_dims: Sequence[int] = ()):
        super().__init__(d, role, batch_dims)
        self.gamma = nn.Parameter(torch.ones(*self.batch_dims, d))

    def forward(self) -> Float[Tensor, "*batch_dims {self.d}"]:
        """Return gamma."""
        return self.gamma

    @torch.no_grad()
    def set_gamma(self, gamma: Float[Tensor, "*batch_dims {self.d}"]) -> None:
        """Copy gamma."""
        self.gamma.copy_(gamma)


class OffsetScale(ScaleVector):
    """gamma = 1 + offset: Gemma's released form (arXiv:2503.19786).

    Weight decay pulls gamma to 1, not to 0.

    Implicit preconditioner: P = I, as for `DirectScale`; without decay, both train identically.
    """

    form = "offset"

    def __init__(self, d: int, role: Role, batch_dims: Sequence[int] = ()):
        super().__init__(d, role, batch_dims)
        self.offset = nn.Parameter(torch.zeros(*self.batch_dims, d))

    def forward(self) -> Float[Tensor, "*batch_dims {self.d}"]:
        """Return 1 + offset."""
        return 1 + self.offset

    @torch.no_grad()
    def set_gamma(self, gamma: Float[Tensor, "*batch_dims {self.d}"]) -> None:
        """Set offset = gamma - 1."""
        self.offset.copy_(gamma - 1)


class OriginalSpaceScale(ScaleVector):
    """OR: gamma = beta * Norm(alpha), Norm(alpha) = sqrt(d) alpha / ||alpha|| (paper, Section 3.3).

    Implicit preconditioner: P = d g g^T + rho (I - g g^T), with g = gamma / ||gamma|| and
    rho = beta^2 d / ||alpha||^2. alpha is scale-invariant. As in the paper, the norm has no
    epsilon: gamma is exactly 1 at initialization (alpha = 1, beta = 1), and alpha = 0 is an error.
    """

    form = "or"

    def __init__(self, d: int, role: Role, batch_dims: Sequence[int] = ()):
        super().__init__(d, role, batch_dims)
        self.alpha = nn.Parameter(torch.ones(*self.batch_dims, d))
        # (1,), not a scalar: FSDP2 cannot shard parameters of zero dimensions.
        self.beta = nn.Parameter(torch.ones(*self.batch_dims, 1))

    def forward(self) -> Float[Tensor, "*batch_dims {self.d}"]:
        """Return beta * alpha / rms(alpha)."""
        return self.alpha * (self.beta * self.alpha.square().mean(-1, keepdim=True).rsqrt())

    @torch.no_grad()
    def set_gamma(self, gamma: Float[Tensor, "*batch_dims {self.d}"]) -> None:
        """Set alpha = gamma and beta = ||gamma|| / sqrt(d); gamma must not be zero."""
        rms = gamma.square().mean(-1, keepdim=True).sqrt()
        if (rms == 0).any():
            found = "a zero scale vector: it has no direction"
            raise ConfigError(f"'or' cannot represent {found}; convert to 'direct'.")
        self.alpha.copy_(gamma)
        self.beta.copy_(rms)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set alpha to 1 and beta to the initial gamma.

        An alpha of another length would learn its direction at another speed.
        """
        self.alpha.fill_(1.0)
        self.beta.fill_(self.initial)


class ExponentialScale(ScaleVector):
    """ER: gamma = exp(beta) * exp(alpha - mean(alpha)) (paper, Section 3.3).

    Starts at alpha = 0, beta = 0. Only positive gamma can be represented; the adjacent linear map
    can absorb the signs.
    """

    form = "er"

    def __init__(self, d: int, role: Role, batch_dims: Sequence[int] = ()):
        super().__init__(d, role, batch_dims)
        self.alpha = nn.Parameter(torch.zeros(*self.batch_dims, d))
        self.beta = nn.Parameter(torch.zeros(*self.batch_dims, 1))

    def forward(self) -> Float[Tensor, "*batch_dims {self.d}"]:
        """Return exp(beta + alpha - mean(alpha))."""
        return (self.beta + self.alpha - self.alpha.mean(-1, keepdim=True)).exp()

    @torch.no_grad()
    def set_gamma(self, gamma: Float[Tensor, "*batch_dims {self.d}"]) -> None:
        """Set beta = mean(log gamma) and alpha = log gamma - beta; every entry must be positive."""
        if (gamma <= 0).any():
            hint = "convert to 'direct' or 'or', or flip the signs of the adjacent weight."
            raise ConfigError(f"'er' cannot represent a scale vector with an entry <= 0; {hint}")
        log_gamma = gamma.log()
        self.beta.copy_(log_gamma.mean(-1, keepdim=True))
        self.alpha.copy_(log_gamma - self.beta)


class HeadShared(ScaleVector):
    """gamma = (g, ..., g): one vector g of head width for all heads, in any parameterization."""

    form = "shared by heads"

    def __init__(self, vector: ScaleVector, n_head: int):
        super().__init__(n_head * vector.d, vector.role, vector.batch_dims)
        self.vector = vector
        self.n_head = n_head
        self.initial = vector.initial

    @property
    def magnitude(self) -> nn.Parameter | None:
        """Magnitude parameter of g."""
        return self.vector.magnitude

    def forward(self) -> Tensor:
        """Return g, repeated for each head: (*batch_dims, d)."""
        g: Tensor = self.vector()
        repeats = [1] * len(self.batch_dims)
        return g.repeat(*repeats, self.n_head)

    def reset_parameters(self) -> None:
        """Set g to its initial value."""
        self.vector.reset_parameters()

    def set_gamma(self, gamma: Tensor) -> None:
        """Set g; gamma must be equal for all heads."""
        g = gamma.unflatten(-1, (self.n_head, self.vector.d))
        if (g != g[..., :1, :]).any():
            found = "scale vectors differ between heads, which share_heads excludes"
            raise ConfigError(f"{found}; remove share_heads.")
        self.vector.set_gamma(g[..., 0, :])
