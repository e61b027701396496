"""RMSNorm with a hand-written derivative, also for functions that are fused with a norm.

With r = 1 / sqrt(mean(x^2) + eps) and xhat = r x, forward saves x and r, (rows, d) and (rows, 1).
Backward makes xhat again. With g = gamma * grad:

    dx     = r (g - xhat mean(g xhat))      the mean is the part that changes r
    dgamma = sum over rows of grad xhat
"""

from typing import Any

import torch
from torch import Tensor

import lightning_sv.scale.definitions as definitions
from lightning_sv.scale.definitions import upcast
from lightning_sv.scale.fast.eager import definition_gradients, row_chunks, uses_definition
from lightning_sv.scale.shapes import Float


def normalize(
    x: Float[Tensor, "*rows d"], eps: float, gamma: Float[Tensor, "... d"] | None = None
) -> Float[Tensor, "*rows d"]:
    """Return gamma * x / sqrt(mean(x^2) + eps), the mean over the last axis.

    Norm(x) = sqrt(d) x / ||x|| of the paper, with the usual eps under the root. Everything is
    computed in float32 or wider and rounded once to x's dtype. A float32 gamma near 1 therefore
    keeps its digits and does not promote bf16 activations.

    Args:
        x: (..., d)
        eps: added to the mean square
        gamma: the shape of x's last axes, or None
    """
    if uses_definition():
        return definitions.normalize(x, eps, gamma)
    return _Normalize.apply(x, eps, gamma)


class _Normalize(torch.autograd.Function):
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
        grad_x: Tensor | None
        if torch.is_grad_enabled():

            def definition(x: Tensor, gamma: Tensor | None) -> Tensor:
                return definitions.normalize(x, ctx.eps, gamma)

            grad_x, grad_gamma = definition_gradients(definition, (x, gamma), grad)
        else:
            grad_x, grad_gamma = norm_gradients(grad, x, rrms, gamma)
        return grad_x, None, grad_gamma


def inverse_rms(x: Float[Tensor, "*rows d"], eps: float) -> Float[Tensor, "*rows 1"]:
    """Return 1 / sqrt(mean(x^2) + eps) over the last axis, in float32 or wider."""
    wide = upcast(x)
    if torch.compiler.is_compiling():
        return torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)

    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)  # without a copy of x^2
    mean_square = length.square_().div_(x.shape[-1])
    return mean_square.add_(eps).rsqrt_()


def scale_inplace(buffer: Tensor, gamma: Tensor | None) -> Tensor:
    """Return gamma * buffer, computed in place."""
    return buffer if gamma is None else buffer.mul_(gamma)


def zeros_for_gradient(gamma: Tensor | None) -> Tensor | None:
    """Return zeros in which the gradient of gamma is summed; 16 bits would round each sum."""
    return None if gamma is None else torch.zeros_like(upcast(gamma))


def norm_gradients(
    grad: Float[Tensor, "*rows d"],
    x: Float[Tensor, "*rows d"],
    rrms: Float[Tensor, "*rows 1"],
    gamma: Float[Tensor, "... d"] | None,
) -> tuple[Float[Tensor, "*rows d"], Float[Tensor, "... d"] | None]:
    """Return the gradients of gamma * rrms * x by x, also through rrms, and by gamma."""
    heads = () if gamma is None else gamma.shape[:-1]  # a gamma of (heads, d) has rows (heads, d)
    grad, rows, rrms = (t.reshape(-1, *heads, t.shape[-1]) for t in (grad, x, rrms))
    grad_x = torch.empty_like(rows, memory_format=torch.contiguous_format)
    grad_gamma = zeros_for_gradient(gamma)
    for dy, z, r, out in row_chunks(grad, rows, rrms, grad_x):
        add_norm_gradients(upcast(dy), upcast(z) * r, r, gamma, out, grad_gamma)
    return grad_x.view_as(x), grad_gamma


def add_norm_gradients(
    grad: Tensor,
    xhat: Tensor,
    rrms: Tensor,
    gamma: Tensor | None,
    grad_x: Tensor,
    grad_gamma: Tensor | None,
) -> None:
    """Write the gradient of x to grad_x and add that of gamma to grad_gamma, by the formulas above.

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
    scaled_grad = grad if gamma is None else torch.mul(grad, gamma, out=product)
    projected = torch.addcmul(scaled_grad, xhat, mean, value=-1, out=product)
    torch.mul(projected, rrms, out=grad_x)
