"""The scaled product of `fold` with one weight per expert: gamma_out[e] * (W[e] (gamma_in[e] * x[r])), e of row r.

All rows are in one buffer, sorted by expert, so that a product over all experts is one call. Shapes: R rows of the
buffer, E experts.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sv.scale.fold import effective_weight, product_dtype
from lightning_sv.scale.grouped_mm import grouped_mm, grouped_mm_wgrad

#: Fold the weights from this many scaled activations (both sides) per weight entry; below, scale the activations:
#: break-even on a CPU at 30 rows per expert for 128 x 88, at 100 for 256 x 352.
FOLD_FROM = 0.7


class Rows(NamedTuple):
    """Assignment of a buffer's rows to experts.

    Attributes:
        expert: (R,) int64, expert of each row; E - 1 for rows after the last block, which are zero and never read
        ends: (E,) int32, end of each block; blocks begin at 0, ends[0], ends[1], ...
        filled: lower bound of the number of assigned rows, known without reading `ends`
    """

    expert: Tensor
    ends: Tensor
    filled: int = 0


class Factors(NamedTuple):
    """Factors of a product with rows: gamma_out * (W (gamma_in * x)).

    Attributes:
        weight: (E, d_out, d_in)
        gamma_in: (E, d_in), or None for 1
        gamma_out: (E, d_out), or None for 1
    """

    weight: Tensor
    gamma_in: Tensor | None = None
    gamma_out: Tensor | None = None


def grouped_product(x: Tensor, factors: Factors, rows: Rows) -> Tensor:
    """Return gamma_out[e] * (W[e] (gamma_in[e] * x[r])) for every row r, e = rows.expert[r].

    Rows from rows.ends[-1] on are zero and have zero gradients; an expert without rows has zero gradients.
    Autograd saves x, the weight and the gammas, without folded, cast or padded copies.

    Args:
        x: (R, d_in); zero in rows without a token
        factors: the weight and the gammas
        rows: the expert of each row

    Returns:
        (R, d_out), in the autocast dtype if autocast is on.
    """
    out: Tensor = _GroupedProduct.apply(x, *rows, product_dtype(x, factors.weight), *factors)
    return out


class _GroupedProduct(torch.autograd.Function):
    """The product of `grouped_product`. Saves only its inputs; twice differentiable."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, expert: Tensor, ends: Tensor, filled: int, dtype: torch.dtype, *factors: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, expert, ends, *factors)
        ctx.filled, ctx.dtype = filled, dtype
        return _scaled(x, Factors(*factors), Rows(expert, ends, filled), dtype)  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, expert, ends, *saved = ctx.saved_tensors
        weight, gamma_in, gamma_out = factors = Factors(*saved)
        grad = grads[0].to(ctx.dtype)
        grad_x: Tensor | None = None
        gradients: tuple[Tensor | None, ...] = (None, None, None)
        with torch.autocast(x.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                transposed = Factors(weight.mT, gamma_out, gamma_in)
                grad_x = _scaled(grad, transposed, Rows(expert, ends, ctx.filled), ctx.dtype).to(x.dtype)
            if any(ctx.needs_input_grad[5:]):
                gradients = _gradients(grouped_mm_wgrad(grad, x.to(ctx.dtype), ends, ctx.filled), factors)
        return grad_x, None, None, None, None, *gradients


def _gradients(grad_folded: Tensor, factors: Factors) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of the factors from that of their effective weight."""
    weight, gamma_in, gamma_out = factors
    grad_folded = grad_folded.to(weight.dtype)
    half = grad_folded if gamma_out is None else grad_folded * gamma_out.unsqueeze(-1)
    return (
        half if gamma_in is None else half * gamma_in.unsqueeze(-2),
        None if gamma_in is None else (half * weight).sum(-2),
        None if gamma_out is None else (grad_folded * effective_weight(weight, gamma_in, None)).sum(-1),
    )


def _scaled(x: Tensor, factors: Factors, rows: Rows, dtype: torch.dtype) -> Tensor:
    weight, gamma_in, gamma_out = factors
    if len(x) * sum(weight.shape[1:]) >= FOLD_FROM * weight.numel():
        y: Tensor = grouped_mm(x.to(dtype), effective_weight(*factors).to(dtype), rows.ends, rows.filled)
        return y
    if gamma_in is not None:
        x = x * gamma_in[rows.expert]
    y = grouped_mm(x.to(dtype), weight.to(dtype), rows.ends, rows.filled)
    return y if gamma_out is None else (y * gamma_out[rows.expert]).to(dtype)
