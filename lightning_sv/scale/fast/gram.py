"""Norm of a linear map's output from its Gram matrix: `dnp` at the lm_head without the logits.

    mean((W' x)^2) = x^T G x,   G = W'^T W' / d_out   (d_in x d_in),   W' = W diag(gamma_in)

So gamma_out * Norm(W' x) = (diag(gamma_out) W') (r x) with r = (x^T G x + eps)^(-1/2): a plain
linear map of a rescaled input. It costs d_in / d_out + d_in / tokens of the product with W, without
a pass over tokens x d_out.

The norm does not depend on the length of W' x. In gamma_in's gradient the contributions of W'
through r and directly therefore nearly cancel, and with bf16 products its error is two to three
times that of the definition (0.7% against 0.3% at 2,048 tokens, d 256, 4,096 outputs); the error of
the gradients of x and W is a fifth smaller.

If one direction of W' dominates, the sum x^T G x cancels for x orthogonal to it. In bf16 its error
then grows with the square of that direction's length, and that of the definition with the length.
Measured with W' = noise + s 1 u^T (noise of variance 1, ones 1, a unit vector u; 2,048 tokens,
d 256, 4,096 outputs), the largest relative error of r:

    s     by G                       by the definition
    0     0.05%                      0.07%
    30    1.4%                       0.5%
    100   13%                        1.4%
    300   6 sums x^T G x are < 0     3.4%

A negative sum counts as 0, without a gradient, so that r and the gradients are finite.

Derivatives, with s = -r^3 grad / d_out and X the rows of x:

    dx = s (d_out G) x,   dW' = W' (X^T diag(s) X)
"""

from typing import Any

import torch
from torch import Tensor

from lightning_sv.scale.definitions import effective_weight, product_dtype
from lightning_sv.scale.fast.eager import (
    definition_gradients,
    rows_of,
    uses_definition,
    without_autocast,
)
from lightning_sv.scale.fast.fold import fold_gradients
from lightning_sv.scale.shapes import Float


def inverse_rms_of_product(
    x: Float[Tensor, "*tokens d_in"],
    weight: Float[Tensor, "d_out d_in"],
    gamma_in: Float[Tensor, " d_in"] | None,
    eps: float,
) -> Float[Tensor, "*tokens 1"]:
    """Return 1 / sqrt(mean((W (gamma_in * x))^2) + eps), the mean over the outputs.

    A gamma_in of None is 1. The result is in float32 or wider. Products are in the autocast dtype
    if autocast is on.
    """
    if uses_definition():
        return inverse_rms_by_gram(x, gram_matrix(x, weight, gamma_in), weight, eps)
    return _InverseRms.apply(x, weight, gamma_in, eps)


def gram_matrix(
    x: Float[Tensor, "*tokens d_in"],
    weight: Float[Tensor, "d_out d_in"],
    gamma_in: Float[Tensor, " d_in"] | None,
) -> Float[Tensor, "d_in d_in"]:
    """Return d_out G times `_fp16_factor`, in the dtype of products with x."""
    dtype = product_dtype(x, weight)
    factor = _fp16_factor(dtype, len(weight))
    folded = effective_weight(weight, gamma_in, None)
    if factor != 1:
        folded = folded * factor**0.5
    folded = folded.to(dtype)
    return folded.T @ folded


def inverse_rms_by_gram(
    x: Float[Tensor, "*tokens d_in"],
    gram: Float[Tensor, "d_in d_in"],
    weight: Float[Tensor, "d_out d_in"],
    eps: float,
) -> Float[Tensor, "*tokens 1"]:
    """Return (x^T G x + eps)^(-1/2) from the result of `gram_matrix`."""
    return (mean_square_by_gram(x, gram, weight) + eps).rsqrt()


def mean_square_by_gram(
    x: Float[Tensor, "*tokens d_in"],
    gram: Float[Tensor, "d_in d_in"],
    weight: Float[Tensor, "d_out d_in"],
) -> Float[Tensor, "*tokens 1"]:
    """Return x^T G x from the result of `gram_matrix`; 0 if rounding makes it negative."""
    factor = _fp16_factor(gram.dtype, len(weight))
    square = (x.to(gram.dtype) @ gram * x.to(weight.dtype)).sum(-1, keepdim=True)
    return square.clamp(min=0) / (len(weight) * factor)


def _fp16_factor(dtype: torch.dtype, d_out: int) -> float:
    """Return a factor of the Gram matrix: sums over a vocabulary overflow float16."""
    return float(d_out**-0.5) if dtype == torch.float16 else 1.0


class _InverseRms(torch.autograd.Function):
    """Saves its inputs, G and x^T G x, but no folded copy of W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gamma_in: Tensor | None, eps: float) -> Tensor:
        gram = gram_matrix(x, weight, gamma_in)
        mean_square = mean_square_by_gram(x, gram, weight)
        ctx.eps = eps
        ctx.save_for_backward(x, weight, gamma_in, gram, mean_square)
        return (mean_square + eps).rsqrt()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight, gamma_in, gram, mean_square = ctx.saved_tensors
        dtype = gram.dtype
        if torch.is_grad_enabled():

            def definition(x: Tensor, weight: Tensor, gamma_in: Tensor | None) -> Tensor:
                return inverse_rms_by_gram(x, gram_matrix(x, weight, gamma_in), weight, ctx.eps)

            # as in forward
            with torch.autocast(x.device.type, dtype, enabled=dtype != weight.dtype):
                return *definition_gradients(definition, (x, weight, gamma_in), grad), None

        r = (mean_square + ctx.eps).rsqrt()
        s = grad * r.pow(3) / -len(weight)
        s = s.masked_fill(mean_square == 0, 0)  # a clamped square is a constant
        scaled = x * s
        with without_autocast(x):
            grad_x = (scaled.to(dtype) @ gram).to(x.dtype)
            # (d_in, d_in)
            grad_gram = rows_of(x.to(weight.dtype)).T @ rows_of(scaled.to(weight.dtype))
            grad_folded = effective_weight(weight, gamma_in, None) @ grad_gram  # (d_out, d_in)

        factor = _fp16_factor(dtype, len(weight))
        if factor != 1:
            grad_x = grad_x / factor
        grad_weight, grad_in, _ = fold_gradients(grad_folded, weight, gamma_in, None)
        return grad_x, grad_weight, grad_in, None
