"""The scaled product of `fold` with one weight per expert: gamma_out[e] * (W[e] (gamma_in[e] * x[r])), e of row r.

All rows are in one buffer, sorted by expert, so that a product over all experts is one call. Shapes: R rows of the
buffer, E experts.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sv.scale.fold import effective_weight, product_dtype
from lightning_sv.scale.grouped_mm import grouped_mm, grouped_mm_wgrad

#: Fold the weights from this many scaled activations (both sides) per weight entry; below, scale the activations:
#: break-even on a CPU at 30 rows per expert for 128 x 88, at 100 for 256 x 352.
FOLD_FROM = 0.7
#: On a CPU under autocast, weights with fewer entries per expert are concatenated for one product: 0.90 of a block's
#: time for 128 x 88 and 256 x 176, 0.97 for 256 x 256, more than 1 for 256 x 352. In float32 the copy cancels the gain.
AS_ONE_BELOW = 1 << 16


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
    return _apply(x, [factors], rows)[0]


def grouped_products(x: Tensor, factors: Sequence[Factors], rows: Rows) -> tuple[Tensor, ...]:
    """Return `grouped_product` with each of the factors, as one product if that is faster."""
    if all(_gains_as_one(x, f.weight) for f in factors):
        return _apply(x, factors, rows)
    return tuple(grouped_product(x, f, rows) for f in factors)


def _gains_as_one(x: Tensor, weight: Tensor) -> bool:
    # A cast copies the weights anyway, so concatenating them needs no further copy.
    cast = product_dtype(x, weight) != weight.dtype
    return not x.is_cuda and cast and _is_folded(x, weight) and weight[0].numel() < AS_ONE_BELOW


def _apply(x: Tensor, factors: Sequence[Factors], rows: Rows) -> tuple[Tensor, ...]:
    flat = [tensor for each in factors for tensor in each]
    out: tuple[Tensor, ...] = _GroupedProduct.apply(x, *rows, product_dtype(x, factors[0].weight), *flat)
    return out


class _GroupedProduct(torch.autograd.Function):
    """The product with one or more `Factors`, as concatenated columns. Saves only its inputs; twice differentiable."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, expert: Tensor, ends: Tensor, filled: int, dtype: torch.dtype, *flat: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, expert, ends, *flat)
        ctx.filled, ctx.dtype = filled, dtype
        rows, factors = Rows(expert, ends, filled), _unflattened(flat)
        if len(factors) == 1:
            return (_scaled(x, *factors[0], rows, dtype),)
        y = grouped_mm(x.to(dtype), _folded(factors, dtype), ends, filled)
        # Contiguous parts: elementwise operations on strided rows cost more than this copy.
        return tuple(part.contiguous() for part in y.split(_widths(factors), -1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, expert, ends, *flat = ctx.saved_tensors
        rows, factors = Rows(expert, ends, ctx.filled), _unflattened(flat)
        grad = (grads[0] if len(grads) == 1 else torch.cat(grads, -1)).to(ctx.dtype)
        with torch.autocast(x.device.type, enabled=False):
            grad_x: Tensor | None = None
            gradients: list[Tensor | None] = [None] * len(flat)
            if ctx.needs_input_grad[0]:
                if len(factors) == 1:
                    weight, gamma_in, gamma_out = factors[0]
                    grad_x = _scaled(grad, weight.mT, gamma_out, gamma_in, rows, ctx.dtype).to(x.dtype)
                else:
                    grad_x = grouped_mm(grad, _folded(factors, ctx.dtype).mT, ends, ctx.filled).to(x.dtype)
            if any(ctx.needs_input_grad[5:]):
                folded = grouped_mm_wgrad(grad, x.to(ctx.dtype), ends, ctx.filled).split(_widths(factors), 1)
                gradients = [t for f, part in zip(factors, folded, strict=True) for t in _gradients(part, f)]
        return grad_x, None, None, None, None, *gradients


def _unflattened(flat: Sequence[Any]) -> list[Factors]:
    return [Factors(*flat[i : i + 3]) for i in range(0, len(flat), 3)]


def _widths(factors: list[Factors]) -> list[int]:
    return [f.weight.shape[1] for f in factors]


def _folded(factors: list[Factors], dtype: torch.dtype) -> Tensor:
    """Return the effective weights, concatenated along d_out: (E, sum of d_out, d_in)."""
    n, _, d_in = factors[0].weight.shape
    out = factors[0].weight.new_empty(n, sum(_widths(factors)), d_in, dtype=dtype)
    end = 0
    for f, width in zip(factors, _widths(factors), strict=True):
        begin, end = end, end + width
        out[:, begin:end] = effective_weight(*f)
    return out


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


def _is_folded(x: Tensor, weight: Tensor) -> bool:
    return len(x) * sum(weight.shape[1:]) >= FOLD_FROM * weight.numel()


def _scaled(
    x: Tensor,
    weight: Tensor,
    gamma_in: Tensor | None,
    gamma_out: Tensor | None,
    rows: Rows,
    dtype: torch.dtype,
) -> Tensor:
    if _is_folded(x, weight):
        y: Tensor = grouped_mm(
            x.to(dtype), effective_weight(weight, gamma_in, gamma_out).to(dtype), rows.ends, rows.filled
        )
        return y
    if gamma_in is not None:
        x = x * gamma_in[rows.expert]
    y = grouped_mm(x.to(dtype), weight.to(dtype), rows.ends, rows.filled)
    return y if gamma_out is None else (y * gamma_out[rows.expert]).to(dtype)
