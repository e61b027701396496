"""The product of a branch with its scale vectors folded into the matrix (paper, Section 3.4).

    gamma_out * (W (gamma_in * x)) = (diag(gamma_out) W diag(gamma_in)) x

The left side scales activations: O(tokens (d_in + d_out)), and each branch keeps scaled copies. The
right side scales the matrix: O(d_out d_in) for any number of tokens. Both have the same
derivatives. Autograd would keep the folded matrix, 1.2 GB for Llama-1B, which FSDP could not
release; so forward saves (x, W, gammas), and backward folds again.

`effective_weight` is the matrix alone, for models whose own code computes the product.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import lightning_sv.scale.definitions as definitions
from lightning_sv.scale.definitions import product_dtype
from lightning_sv.scale.fast.eager import rows_of, uses_definition, without_autocast
from lightning_sv.scale.shapes import Float


def scaled_product(
    x: Float[Tensor, "... d_in"],
    weight: Float[Tensor, "d_out d_in"],
    gamma_in: Float[Tensor, " d_in"] | None = None,
    gamma_out: Float[Tensor, " d_out"] | None = None,
) -> Float[Tensor, "... d_out"]:
    """Return gamma_out * (W (gamma_in * x)), in the autocast dtype if autocast is on.

    A gamma of None is 1.
    """
    if gamma_in is None and gamma_out is None:
        return F.linear(x, weight)
    if uses_definition():
        return definitions.scaled_product(x, weight, gamma_in, gamma_out)
    return _FoldedProduct.apply(x, weight, gamma_in, gamma_out)


class _FoldedProduct(torch.autograd.Function):
    """Twice differentiable, because backward consists of differentiable operations."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, gamma_in: Tensor | None, gamma_out: Tensor | None
    ) -> Tensor:
        ctx.dtype = product_dtype(x, weight)
        ctx.save_for_backward(x, weight, gamma_in, gamma_out)
        return definitions.scaled_product(x, weight, gamma_in, gamma_out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight, gamma_in, gamma_out = ctx.saved_tensors
        with without_autocast(x):
            folded = definitions.effective_weight(weight, gamma_in, gamma_out).to(ctx.dtype)
            grad_x = (grad @ folded).to(x.dtype)
            grad_folded = rows_of(grad).T @ rows_of(x.to(ctx.dtype))  # (d_out, d_in)
            return grad_x, *fold_gradients(
                grad_folded.to(weight.dtype), weight, gamma_in, gamma_out
            )


def fold_gradients(
    grad: Tensor, weight: Tensor, gamma_in: Tensor | None, gamma_out: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of W, gamma_in and gamma_out from that of the folded matrix.

    dW = diag(gamma_out) grad diag(gamma_in); with P = grad * W, dgamma_in = P^T gamma_out and
    dgamma_out = P gamma_in. `grad` has the shape of W, (d_out, d_in).
    """
    if gamma_in is None and gamma_out is None:
        return grad, None, None
    grad_weight = definitions.effective_weight(grad, gamma_in, gamma_out)
    product = grad * weight
    if gamma_in is None:
        return grad_weight, None, product.sum(-1)
    if gamma_out is None:
        return grad_weight, product.sum(0), None
    return grad_weight, _product(gamma_out, product), _product(product, gamma_in)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, of which one may have a wider dtype."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype) @ b.to(dtype)


def effective_weight(
    weight: Float[Tensor, "*batch_dims d_out d_in"],
    gamma_in: Float[Tensor, "*batch_dims d_in"] | None = None,
    gamma_out: Float[Tensor, "*batch_dims d_out"] | None = None,
) -> Float[Tensor, "*batch_dims d_out d_in"]:
    """Return diag(gamma_out) W diag(gamma_in); a gamma of None is 1.

    With both gammas autograd would save W diag(gamma_in), a copy of W.
    """
    if gamma_in is None or gamma_out is None or uses_definition():
        return definitions.effective_weight(weight, gamma_in, gamma_out)
    return _EffectiveWeight.apply(weight, gamma_in, gamma_out)


class _EffectiveWeight(torch.autograd.Function):
    """Saves its inputs; twice differentiable as `_FoldedProduct`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gamma_in: Tensor, gamma_out: Tensor) -> Tensor:
        ctx.save_for_backward(weight, gamma_in, gamma_out)
        return definitions.effective_weight(weight, gamma_in, gamma_out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        weight, gamma_in, gamma_out = ctx.saved_tensors
        return effective_weight_gradients(grad, weight, gamma_in, gamma_out)


def effective_weight_gradients(
    grad: Tensor, weight: Tensor, gamma_in: Tensor | None, gamma_out: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of W and the gammas from that of `effective_weight`, as autograd's.

    In contrast to `fold_gradients` it takes leading axes, such as experts: `grad` has the shape of
    W, (*batch_dims, d_out, d_in).
    """
    grad_weight = grad
    grad_in = grad_out = None
    if gamma_out is not None:
        inner = definitions.effective_weight(weight, gamma_in, None)
        grad_out = (grad * inner).sum(-1)  # (*batch_dims, d_out)
        grad_weight = grad_weight * gamma_out.unsqueeze(-1)
    if gamma_in is not None:
        grad_in = (grad_weight * weight).sum(-2)  # (*batch_dims, d_in)
        grad_weight = grad_weight * gamma_in.unsqueeze(-2)
    return grad_weight, grad_in, grad_out
