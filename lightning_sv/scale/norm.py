"""RMSNorm with an optional scale vector: RMSNorm(x; gamma) = gamma * Norm(x) (paper, eq. 1)."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_sv.scale.twice import plain_gradients
from lightning_sv.scale.vector import ScaleVector


def normalize(x: Tensor, eps: float, gamma: Tensor | None = None) -> Tensor:
    """Return gamma * x / sqrt(mean(x^2) + eps), the mean over the last axis.

    Norm(x) = sqrt(d) x / ||x|| of the paper, with the usual eps under the root. Everything is
    computed in float32 or wider and rounded once to x's dtype, so that a float32 gamma near 1 keeps
    its digits and does not promote bf16 activations.

    Args:
        x: (..., d).
        eps: added to the mean square.
        gamma: the shape of x's last axes, or None.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return _normalize(x, eps, gamma)  # the compiler fuses it
    out: Tensor = _Normalize.apply(x, eps, gamma)
    return out


def _normalize(x: Tensor, eps: float, gamma: Tensor | None) -> Tensor:
    wide = _wide(x)
    y: Tensor = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (y if gamma is None else y * gamma).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


class _Normalize(torch.autograd.Function):
    """`_normalize` for eager mode: saves x and 1/rms, recomputes the rest, with few passes over memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, gamma: Tensor | None) -> Tensor:
        rrms = inverse_rms(x, eps)
        ctx.eps = eps
        ctx.save_for_backward(x, rrms, gamma)
        y: Tensor = _wide(x) * rrms
        return (y if gamma is None else y.mul_(gamma)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        (grad,) = grads
        x, rrms, gamma = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted: differentiate the plain form
            grad_x, grad_gamma = plain_gradients(lambda x, gamma: _normalize(x, ctx.eps, gamma), (x, gamma), grad)
            return grad_x, None, grad_gamma
        grad_x, grad_gamma = norm_gradients(grad, x, rrms, gamma)
        return grad_x, None, grad_gamma


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(mean(x^2) + eps), the mean over the last axis, which stays as 1; in float32 or wider."""
    wide = _wide(x)
    if torch.compiler.is_compiling():
        return torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    rrms: Tensor = mean_square.add_(eps).rsqrt_()
    return rrms


def norm_gradients(grad: Tensor, x: Tensor, rrms: Tensor, gamma: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of gamma * rrms * x in x, through rrms = `inverse_rms` of x as well, and in gamma.

    With r = rrms and g = gamma * grad: dx = r g - r^3 x sum(g x) / d, dgamma = sum over rows of grad r x.

    Args:
        grad: of the result, the shape of x.
        x: (..., d).
        rrms: (..., 1).
        gamma: the shape of x's last axes, or None.
    """
    wide, grad = _wide(x), grad.to(rrms.dtype)
    if torch.compiler.is_compiling():  # its passes are fused
        scaled = grad if gamma is None else grad * gamma
        dot = (scaled * wide).sum(-1, keepdim=True)
        rows = None if gamma is None else (grad * wide * rrms).reshape(-1, *gamma.shape)
        grad_x = rrms * scaled - rrms.pow(3) * dot / x.shape[-1] * wide
        return grad_x.to(x.dtype), None if rows is None else rows.sum(0)
    with torch.autocast(x.device.type, enabled=False):
        buffer = grad * wide  # both sums are products with it; then it takes dx
        if gamma is None:
            grad_gamma = None
            dot = buffer.sum(-1, keepdim=True)
            torch.mul(grad, rrms, out=buffer)
        else:
            rows = buffer.reshape(-1, *gamma.shape)  # n, [groups,] d
            grad_gamma = torch.einsum("n...d,n...d->...d", rows, rrms.reshape(len(rows), *gamma.shape[:-1], 1))
            dot = torch.einsum("n...d,...d->n...", rows, gamma).reshape(rrms.shape)
            torch.mul(grad, gamma, out=buffer).mul_(rrms)
        grad_x = buffer.addcmul_(wide, rrms.pow(3).mul_(dot), value=-1 / x.shape[-1])
        return grad_x.to(x.dtype), grad_gamma


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
