"""RMSNorm with an optional scale vector: RMSNorm(x; gamma) = gamma * Norm(x) (paper, eq. 1)."""

import torch
from torch import Tensor, nn

from lightning_sv.scale.vector import ScaleVector


def normalize(x: Tensor, eps: float, gamma: Tensor | None = None) -> Tensor:
    """Return gamma * x / sqrt(mean(x^2) + eps), the mean over the last axis.

    Norm(x) = sqrt(d) x / ||x|| of the paper, with the usual eps under the root. Everything is
    computed in float32 or wider and rounded once to x's dtype, so that a float32 gamma near 1 keeps
    its digits and does not promote bf16 activations.

    Args:
        x: (..., d).
        eps: added to the mean square.
        gamma: any shape that broadcasts against x, or None.
    """
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if gamma is not None:
        y = y * gamma
    return y.to(x.dtype)


class RMSNorm(nn.Module):
    """Normalize, then scale if the norm has a scale vector of its own.

    Args:
        d: width of the last axis.
        eps: added to the mean square under the root.
        scale: the norm's scale vector, or None (`nop`, `ap`, and under `hg`, where the branches own
            their vectors).
    """

    def __init__(self, d: int, eps: float, scale: ScaleVector | None = None):
        super().__init__()
        assert scale is None or scale.d == d
        self.d, self.eps, self.scale = d, eps, scale

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., d)."""
        return normalize(x, self.eps, None if self.scale is None else self.scale())

    def extra_repr(self) -> str:
        """Show width and eps in the printed module."""
        return f"{self.d}, eps={self.eps}"
