"""The product gamma_out * (W (gamma_in * xhat)), folded: (diag(gamma_out) W diag(gamma_in)) xhat.

Folding costs O(d_out d_in) for any number of tokens. Scaling the activations costs O(tokens (d_in + d_out)) and
keeps scaled copies per branch. Both have the same derivatives.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_sv.scale.eager import uses_reference
from lightning_sv.scale.shapes import Float


def scaled_product(
    xhat: Float[Tensor, "... d_in"],
    weight: Float[Tensor, "d_out d_in"],
    gamma_in: Float[Tensor, " d_in"] | None = None,
    gamma_out: Float[Tensor, " d_out"] | None = None,
) -> Float[Tensor, "... d_out"]:
    """Return gamma_out * (W (gamma_in * xhat)), in the autocast dtype if autocast is on; a gamma of None is 1."""
    if gamma_in is None and gamma_out is None:
        return F.linear(xhat, weight)
    if uses_reference():  # the compiler fuses the fold with the cast and recomputes it in backward
        dtype = product_dtype(xhat, weight)
        return F.linear(xhat.to(dtype), effective_weight(weight, gamma_in, gamma_out).to(dtype))
    return _FoldedProduct.apply(xhat, weight, gamma_in, gamma_out)


def effective_weight(
    weight: Float[Tensor, "*batch_dims d_out d_in"],
    gamma_in: Float[Tensor, "*batch_dims d_in"] | None,
    gamma_out: Float[Tensor, "*batch_dims d_out"] | None,
) -> Float[Tensor, "*batch_dims d_out d_in"]:
    """Return diag(gamma_out) W diag(gamma_in), (..., d_out, d_in); paper, Section 3.4."""
    if gamma_in is not None:
        weight = weight * gamma_in.unsqueeze(-2)
    return weight if gamma_out is None else weight * gamma_out.unsqueeze(-1)


def fold_gradients(
    grad: Tensor, weight: Tensor, gamma_in: Tensor | None, gamma_out: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of W, gamma_in and gamma_out from that of diag(gamma_out) W diag(gamma_in)."""
    grad_weight = effective_weight(grad, gamma_in, gamma_out)
    both = grad * weight  # dgamma_in = gamma_out^T both, dgamma_out = both gamma_in
    grad_in = grad_out = None
    if gamma_in is not None:
        grad_in = both.sum(0) if gamma_out is None else gamma_out @ both
    if gamma_out is not None:
        grad_out = both.sum(-1) if gamma_in is None else both @ gamma_in
    return grad_weight, grad_in, grad_out


def product_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of a product with `weight`: autocast's if enabled, else the weight's."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # torch raises an error for meta
        return weight.dtype
    return torch.get_autocast_dtype(device)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context for backward passes that users call under autocast, which would round float32 products."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def rows_of(x: Float[Tensor, "... d"]) -> Float[Tensor, "rows d"]:
    """Return (..., d) as (rows, d); a single vector is one row."""
    return x.reshape(-1, x.shape[-1])


class _FoldedProduct(torch.autograd.Function):
    """Save (xhat, W, gammas) and fold again in backward, so that no folded copy of W is kept. Twice differentiable."""

    @staticmethod
    def forward(ctx: Any, xhat: Tensor, weight: Tensor, gamma_in: Tensor | None, gamma_out: Tensor | None) -> Tensor:
        ctx.dtype = product_dtype(xhat, weight)
        ctx.save_for_backward(xhat, weight, gamma_in, gamma_out)
        return F.linear(xhat.to(ctx.dtype), effective_weight(weight, gamma_in, gamma_out).to(ctx.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        xhat, weight, gamma_in, gamma_out = ctx.saved_tensors
        with without_autocast(xhat):
            folded = effective_weight(weight, gamma_in, gamma_out).to(ctx.dtype)
            grad_xhat = (grad @ folded).to(xhat.dtype)
            grad_folded = rows_of(grad).T @ rows_of(xhat.to(ctx.dtype))  # (d_out, d_in)
            return grad_xhat, *fold_gradients(grad_folded.to(weight.dtype), weight, gamma_in, gamma_out)
