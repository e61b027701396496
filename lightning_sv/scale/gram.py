"""Norm of a linear map's output from its Gram matrix, so that `dnp` at the lm_head does not read the logits.

    mean((W' x)^2) = x^T G x,   G = W'^T W' / d_out   (d_in x d_in),   W' = W diag(gamma_in)

So gamma_out * Norm(W' x) = (diag(gamma_out) W') (r x) with r = (x^T G x + eps)^(-1/2): a plain linear map of a rescaled
input. It costs d_in / d_out + d_in / tokens of the product with W, without a pass over tokens x d_out.

The norm does not depend on the length of W' x. In gamma_in's gradient the contributions of W' through r and directly
therefore nearly cancel, and with bf16 products its error is two to three times that of the definition (0.7% against
0.3% at 2,048 tokens, d 256, 4,096 outputs); the error of the gradients of x and W is a fifth smaller.
"""

from typing import Any

import torch
from torch import Tensor

from lightning_sv.scale.eager import reference_gradients, uses_reference
from lightning_sv.scale.fold import effective_weight, product_dtype, rows_of, without_autocast
from lightning_sv.scale.shapes import Float


def inverse_rms_of_product(
    x: Float[Tensor, "*tokens d_in"],
    weight: Float[Tensor, "d_out d_in"],
    gamma_in: Float[Tensor, " d_in"] | None,
    eps: float,
) -> Float[Tensor, "*tokens 1"]:
    """Return 1 / sqrt(mean((W (gamma_in * x))^2) + eps), the mean over the outputs; a gamma_in of None is 1.

    The result is in float32 or wider. Products are in the autocast dtype if autocast is on.
    """
    if uses_reference():
        return _inverse_rms(x, weight, gamma_in, eps=eps)[0]
    return _InverseRms.apply(x, weight, gamma_in, eps)


def _inverse_rms(x: Tensor, weight: Tensor, gamma_in: Tensor | None, *, eps: float) -> tuple[Tensor, Tensor]:
    """Return the result and d_out G, times `_fp16_factor`."""
    dtype = product_dtype(x, weight)
    folded, factor = effective_weight(weight, gamma_in, None), _fp16_factor(dtype, len(weight))
    folded = (folded if factor == 1 else folded * factor**0.5).to(dtype)
    gram = folded.T @ folded
    square = (x.to(dtype) @ gram * x.to(weight.dtype)).sum(-1, keepdim=True)
    return (square / (len(weight) * factor) + eps).rsqrt(), gram


def _fp16_factor(dtype: torch.dtype, d_out: int) -> float:
    """Return a factor of the Gram matrix, whose sums over a vocabulary exceed the largest number of float16."""
    return float(d_out**-0.5) if dtype == torch.float16 else 1.0


class _InverseRms(torch.autograd.Function):
    """`_inverse_rms` for eager mode: saves its inputs, G and the result, but no folded copy of W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gamma_in: Tensor | None, eps: float) -> Tensor:
        ctx.eps, ctx.dtype = eps, product_dtype(x, weight)
        r, gram = _inverse_rms(x, weight, gamma_in, eps=eps)
        ctx.save_for_backward(x, weight, gamma_in, gram, r)
        return r

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight, gamma_in, gram, r = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: differentiate the reference
            with torch.autocast(x.device.type, ctx.dtype, enabled=ctx.dtype != weight.dtype):
                inputs = x, weight, gamma_in
                return *reference_gradients(lambda *ts: _inverse_rms(*ts, eps=ctx.eps)[0], inputs, grad), None
        # With s = -r^3 grad / d_out: dx = s G x, and dG = X^T diag(s / 2) X is symmetric, so dW' = W' (2 dG).
        s = grad * r.pow(3) / -len(weight)
        rows, scaled = rows_of(x.to(weight.dtype)), x * s
        factor = _fp16_factor(ctx.dtype, len(weight))
        with without_autocast(x):
            grad_x = (scaled.to(ctx.dtype) @ gram).to(x.dtype)
            half = effective_weight(weight, gamma_in, None) @ (rows.T @ rows_of(scaled.to(weight.dtype)))
        grad_x = grad_x if factor == 1 else grad_x / factor
        if gamma_in is None:
            return grad_x, half, None, None
        return grad_x, half * gamma_in, (half * weight).sum(0), None
