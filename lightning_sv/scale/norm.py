"""RMSNorm with an optional scale vector: RMSNorm(x; gamma) = gamma * Norm(x) (paper, eq. 1)."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_sv.scale.eager import reference_gradients, row_chunks, uses_reference
from lightning_sv.scale.shapes import Float
from lightning_sv.scale.vector import DirectScale, ScaleVector


def normalize(
    x: Float[Tensor, "*rows d"], eps: float, gamma: Float[Tensor, "... d"] | None = None
) -> Float[Tensor, "*rows d"]:
    """Return gamma * x / sqrt(mean(x^2) + eps), the mean over the last axis.

    Norm(x) = sqrt(d) x / ||x|| of the paper, with the usual eps under the root. Everything is
    computed in float32 or wider and rounded once to x's dtype. A float32 gamma near 1 therefore keeps
    its digits and does not promote bf16 activations.

    Args:
        x: (..., d)
        eps: added to the mean square
        gamma: the shape of x's last axes, or None
    """
    if uses_reference():
        return _normalize(x, eps, gamma)
    return _Normalize.apply(x, eps, gamma)


def _normalize(x: Tensor, eps: float, gamma: Tensor | None) -> Tensor:
    z = upcast(x)
    y: Tensor = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)
    return (y if gamma is None else y * gamma).to(x.dtype)


def upcast(x: Tensor) -> Tensor:
    """Return x in float32, or unchanged if it is wider."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


class _Normalize(torch.autograd.Function):
    """`_normalize` for eager mode: saves x and 1/rms and recomputes the rest, in few passes over memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, gamma: Tensor | None) -> Tensor:
        rrms = inverse_rms(x, eps)
        ctx.eps = eps
        ctx.save_for_backward(x, rrms, gamma)
        return scale_inplace(upcast(x) * rrms, gamma).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        (grad,) = grads
        x, rrms, gamma = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: differentiate the reference
            grad_x, grad_gamma = reference_gradients(lambda x, gamma: _normalize(x, ctx.eps, gamma), (x, gamma), grad)
        else:
            grad_x, grad_gamma = norm_gradients(grad, x, rrms, gamma)
        return grad_x, None, grad_gamma


def inverse_rms(x: Float[Tensor, "*rows d"], eps: float) -> Float[Tensor, "*rows 1"]:
    """Return 1 / sqrt(mean(x^2) + eps) over the last axis, which is kept; in float32 or wider."""
    z = upcast(x)
    if torch.compiler.is_compiling():
        return torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)
    mean_square = torch.linalg.vector_norm(z, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    return mean_square.add_(eps).rsqrt_()


def scale_inplace(buffer: Tensor, gamma: Tensor | None) -> Tensor:
    """Return gamma * buffer, computed in place."""
    return buffer if gamma is None else buffer.mul_(gamma)


def norm_gradients(
    grad: Float[Tensor, "*rows d"],
    x: Float[Tensor, "*rows d"],
    rrms: Float[Tensor, "*rows 1"],
    gamma: Float[Tensor, "... d"] | None,
) -> tuple[Float[Tensor, "*rows d"], Float[Tensor, "... d"] | None]:
    """Return the gradients of gamma * rrms * x with respect to x, including through rrms = `inverse_rms`, and gamma."""
    shape = x.shape[-1:] if gamma is None else gamma.shape
    rows = [t.reshape(-1, *shape[:-1], t.shape[-1]) for t in (grad, x, rrms)]
    grad_x = torch.empty_like(rows[1], memory_format=torch.contiguous_format)
    grad_gamma = None if gamma is None else torch.zeros_like(upcast(gamma))  # 16 bits would round each sum
    for dy, z, r, out in row_chunks(*rows, grad_x):
        add_norm_gradients(upcast(dy), upcast(z) * r, r, gamma, out, grad_gamma)
    return grad_x.view_as(x), grad_gamma


def add_norm_gradients(
    grad: Tensor, xhat: Tensor, rrms: Tensor, gamma: Tensor | None, grad_x: Tensor, grad_gamma: Tensor | None
) -> None:
    """Write the gradient of x to grad_x and add that of gamma to grad_gamma, for gamma * xhat with xhat = rrms * x.

    With g = gamma * grad: dx = rrms (g - xhat mean(g xhat)), dgamma = sum over rows of grad xhat.

    Args:
        grad: gradient of the result, the shape of xhat
        xhat: (rows, ..., d), in float32 or wider
        rrms: (rows, ..., 1), `inverse_rms` of x
        gamma: the shape of a row, or None
        grad_x: the shape of xhat
        grad_gamma: the shape of gamma, or None
    """
    product = xhat * grad
    if grad_gamma is not None:
        grad_gamma += product.sum(0)
    mean = scale_inplace(product, gamma).mean(-1, keepdim=True)
    scaled = grad if gamma is None else torch.mul(grad, gamma, out=product)
    torch.mul(torch.addcmul(scaled, xhat, mean, value=-1, out=product), rrms, out=grad_x)


class RMSNorm(nn.Module):
    """Normalize, then apply the norm's scale vector if it has one; `RMSNorm(d)` equals torch's.

    Args:
        d: width of the last axis
        eps: added to the mean square under the root; None for the machine epsilon of the input's dtype, for 16 bits
            that of float32, as in torch
        scale: scale vector of the norm; 'direct' for one that stores gamma; None for none (`nop`, `ap`, and `hg`,
            in which the branches own their vectors)
    """

    def __init__(self, d: int, eps: float | None = None, scale: ScaleVector | Literal["direct"] | None = "direct"):
        super().__init__()
        vector = DirectScale(d, "input") if scale == "direct" else scale
        assert vector is None or vector.d == d
        self.d, self.eps, self.scale = d, eps, vector

    def forward(self, x: Float[Tensor, "*rows {self.d}"]) -> Float[Tensor, "*rows {self.d}"]:
        """(..., d) -> (..., d)."""
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if self.eps is None else self.eps
        return normalize(x, eps, None if self.scale is None else self.scale())

    def extra_repr(self) -> str:
        """Show width and eps in the printed module."""
        return f"{self.d}, eps={self.eps}"
