"""RMSNorm with an optional scale vector: RMSNorm(x; gamma) = gamma * Norm(x) (paper, eq. 1)."""

from typing import Literal

import torch
from torch import Tensor, nn

from lightning_sv.scale.fast import normalize
from lightning_sv.scale.shapes import Float
from lightning_sv.scale.vector import DirectScale, ScaleVector, gamma_of


class RMSNorm(nn.Module):
    """Normalize, then apply the norm's scale vector if it has one; `RMSNorm(d)` equals torch's.

    Args:
        d: width of the last axis
        eps: added to the mean square under the root; None for the machine epsilon of the input's
            dtype, for 16 bits that of float32, as in torch
        scale: scale vector of the norm; 'direct' for one that stores gamma; None for none (`nop`,
            `ap`, and `hg`, in which the branches own their vectors)
    """

    def __init__(
        self,
        d: int,
        eps: float | None = None,
        scale: ScaleVector | Literal["direct"] | None = "direct",
    ):
        super().__init__()
        vector = DirectScale(d, "input") if scale == "direct" else scale
        assert vector is None or vector.d == d
        self.d = d
        self.eps = eps
        self.scale = vector

    def forward(self, x: Float[Tensor, "*rows {self.d}"]) -> Float[Tensor, "*rows {self.d}"]:
        """(..., d) -> (..., d)."""
        eps = self.eps
        if eps is None:
            eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
        return normalize(x, eps, gamma_of(self.scale))

    def extra_repr(self) -> str:
        """Show width and eps in the printed module."""
        return f"{self.d}, eps={self.eps}"
