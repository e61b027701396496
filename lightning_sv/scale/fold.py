"""The product W (gamma * xhat), folded: (W diag(gamma)) xhat.

Folding costs O(d_out d_in) whatever the number of tokens, where scaling the activations costs
O(tokens d_in) and keeps a scaled copy of them per branch. Both give the same derivatives.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def scaled_product(xhat: Tensor, weight: Tensor, gamma: Tensor | None) -> Tensor:
    """Return W (gamma * xhat).

    Args:
        xhat: (..., d_in).
        weight: (d_out, d_in).
        gamma: (d_in,), or None for 1.

    Returns:
        (..., d_out), in the autocast dtype where autocast is on.
    """
    if gamma is None:
        return F.linear(xhat, weight)
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        # The compiler fuses the fold with the cast and recomputes it in backward by itself.
        return F.linear(xhat, (weight * gamma).to(weight.dtype))
    folded: Tensor = _FoldedProduct.apply(xhat, weight, gamma)
    return folded


class _FoldedProduct(torch.autograd.Function):
    """Saves (xhat, W, gamma) and folds again in backward, so that no folded copy of W lives on.

    Twice differentiable: backward is made of differentiable operations on saved inputs.
    """

    @staticmethod
    def forward(ctx: Any, xhat: Tensor, weight: Tensor, gamma: Tensor) -> Tensor:
        device = xhat.device.type
        autocast = torch.is_autocast_enabled(device)
        ctx.dtype = torch.get_autocast_dtype(device) if autocast else weight.dtype
        ctx.save_for_backward(xhat, weight, gamma)
        return F.linear(xhat.to(ctx.dtype), (weight * gamma).to(ctx.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (grad,) = grads
        xhat, weight, gamma = ctx.saved_tensors
        folded = (weight * gamma).to(ctx.dtype)
        grad_xhat = (grad @ folded).to(xhat.dtype)
        grad_folded = grad.flatten(0, -2).T @ xhat.to(ctx.dtype).flatten(0, -2)  # (d_out, d_in)
        wide = grad_folded.to(weight.dtype)
        return grad_xhat, wide * gamma, (wide * weight).sum(0)
