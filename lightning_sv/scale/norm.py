"""RMSNorm with an optional scale vector: RMSNorm(x; gamma) = gamma * Norm(x) (paper, eq. 1)."""

from torch import Tensor, nn

from lightning_sv.scale.fast import normalize
from lightning_sv.scale.shapes import Float
from lightning_sv.scale.vector import ScaleVector, gamma_of


class RMSNorm(nn.Module):
    """Normalize, then apply the norm's scale vector if it has one.

    Args:
        d: width of the last axis
        eps: added to the mean square under the root
        scale: scale vector of the norm; None for none (`nop`, `ap`, and `hg`, in which the branches
            own their vectors)
    """

    def __init__(self, d: int, eps: float, scale: ScaleVector | None):
        super().__init__()
        assert scale is None or scale.d == d
        self.d = d
        self.eps = eps
        self.scale = scale

    def forward(self, x: Float[Tensor, "*rows {self.d}"]) -> Float[Tensor, "*rows {self.d}"]:
        """(..., d) -> (..., d)."""
        return normalize(x, self.eps, gamma_of(self.scale))

    def extra_repr(self) -> str:
        """Show width and eps in the printed module."""
        return f"{self.d}, eps={self.eps}"
