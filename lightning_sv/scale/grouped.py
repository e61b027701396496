"""Products with one matrix per expert: gamma_out[e] * (W[e] (gamma_in[e] * x[r])), e the expert of row r.

All rows are in one buffer, sorted by expert, so that a product over all experts is one call. `grouped_mm` and
`grouped_mm_wgrad` are custom operators, opaque to torch.compile, and each is the other's derivative. Weights are not
padded; padding for a kernel is added at the call.

Shapes: R rows of the buffer, E experts; ends (E,) int32 is the end of each expert's block, ends[-1] >= `filled`.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_sv.scale.fold import effective_weight, product_dtype, without_autocast

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


def grouped_product(x: Tensor, weight: Tensor, gamma_in: Tensor | None, gamma_out: Tensor | None, rows: Rows) -> Tensor:
    """Return gamma_out[e] * (W[e] (gamma_in[e] * x[r])) for every row r, e = rows.expert[r].

    Rows from rows.ends[-1] on are zero and have zero gradients; an expert without rows has zero gradients.
    Autograd saves x, the weight and the gammas, without folded, cast or padded copies.

    Args:
        x: (R, d_in); zero in rows without a token
        weight: (E, d_out, d_in)
        gamma_in: (E, d_in), or None for 1
        gamma_out: (E, d_out), or None for 1
        rows: the expert of each row

    Returns:
        (R, d_out), in the autocast dtype if autocast is on.
    """
    return _GroupedProduct.apply(x, *rows, product_dtype(x, weight), weight, gamma_in, gamma_out)


class _GroupedProduct(torch.autograd.Function):
    """The product of `grouped_product`. Saves only its inputs; twice differentiable."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, expert: Tensor, ends: Tensor, filled: int, dtype: torch.dtype, *factors: Any
    ) -> Tensor:
        ctx.save_for_backward(x, expert, ends, *factors)
        ctx.filled, ctx.dtype = filled, dtype
        return _scaled(x, *factors, rows=Rows(expert, ends, filled), dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, expert, ends, weight, gamma_in, gamma_out = ctx.saved_tensors
        grad = grads[0].to(ctx.dtype)
        grad_x: Tensor | None = None
        gradients: tuple[Tensor | None, ...] = (None, None, None)
        with without_autocast(x):
            if ctx.needs_input_grad[0]:
                rows = Rows(expert, ends, ctx.filled)
                grad_x = _scaled(grad, weight.mT, gamma_out, gamma_in, rows=rows, dtype=ctx.dtype).to(x.dtype)
            if any(ctx.needs_input_grad[5:]):
                grad_folded = grouped_mm_wgrad(grad, x.to(ctx.dtype), ends, ctx.filled)
                gradients = _gradients(grad_folded.to(weight.dtype), weight, gamma_in, gamma_out)
        return grad_x, None, None, None, None, *gradients


def _gradients(
    grad_folded: Tensor, weight: Tensor, gamma_in: Tensor | None, gamma_out: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of the factors from that of their effective weight."""
    half = grad_folded if gamma_out is None else grad_folded * gamma_out.unsqueeze(-1)
    return (
        half if gamma_in is None else half * gamma_in.unsqueeze(-2),
        None if gamma_in is None else (half * weight).sum(-2),
        None if gamma_out is None else (grad_folded * effective_weight(weight, gamma_in, None)).sum(-1),
    )


def _scaled(
    x: Tensor, weight: Tensor, gamma_in: Tensor | None, gamma_out: Tensor | None, *, rows: Rows, dtype: torch.dtype
) -> Tensor:
    if len(x) * sum(weight.shape[1:]) >= FOLD_FROM * weight.numel():
        weight, gamma_in, gamma_out = effective_weight(weight, gamma_in, gamma_out), None, None
    if gamma_in is not None:
        x = x * gamma_in[rows.expert]
    y: Tensor = grouped_mm(x.to(dtype), weight.to(dtype), rows.ends, rows.filled)
    return y if gamma_out is None else (y * gamma_out[rows.expert]).to(dtype)


@torch.library.custom_op("lightning_sv::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor, filled: int = 0) -> Tensor:
    """Return W[e] x[r] of each row, zero after the last block, for x (R, d_in) and W (E, d_out, d_in)."""
    if _takes_kernel(x, weight):
        y = F.grouped_mm(_aligned(x), _aligned(weight).mT, offs=ends)
    else:
        y = x.new_empty(len(x), weight.shape[1])
        for (begin, end), w in zip(_blocks(ends), weight.mT.unbind(), strict=True):
            torch.mm(x[begin:end], w, out=y[begin:end])
    if x.is_cuda:
        _clear_without_a_look(y, ends, filled)
    else:
        y[int(ends[-1]) :].zero_()
    return y


@torch.library.custom_op("lightning_sv::grouped_mm_wgrad", mutates_args=())
def grouped_mm_wgrad(left: Tensor, right: Tensor, ends: Tensor, filled: int = 0) -> Tensor:
    """Return left[block]^T right[block] of each block, (E, d_left, d_right), for (R, d_left) and (R, d_right)."""
    if _takes_kernel(left, right):
        return F.grouped_mm(_aligned(left).mT, _aligned(right), offs=ends)
    out = left.new_empty(len(ends), left.shape[1], right.shape[1])
    for (begin, end), o in zip(_blocks(ends), out.unbind(), strict=True):
        torch.mm(left[begin:end].mT, right[begin:end], out=o)
    return out


def _clear_without_a_look(y: Tensor, ends: Tensor, filled: int) -> None:
    """Zero the rows from ends[-1] >= filled on, without a host synchronization."""
    rows = torch.arange(filled, len(y), device=y.device)
    y[filled:].masked_fill_((rows >= ends[-1]).unsqueeze(-1), 0)


def _blocks(ends: Tensor) -> list[tuple[int, int]]:
    return list(pairwise([0, *ends.tolist()]))


def _takes_kernel(a: Tensor, b: Tensor) -> bool:
    """True if `F.grouped_mm` is used.

    On CUDA only for bf16 (the only dtype before torch 2.12), to avoid a host synchronization. On the CPU only if no
    padding is needed, because the loop over experts is almost as fast.
    """
    if a.is_cuda:
        return a.dtype == torch.bfloat16
    return a.dtype in (torch.float32, torch.bfloat16) and _is_aligned(a) and _is_aligned(b)


def _is_aligned(t: Tensor) -> bool:
    """True if one of the last two strides is 1 and the other a multiple of 16 bytes, as `F.grouped_mm` requires."""
    strides = sorted(t.stride())
    return strides[0] == 1 and all(s * t.element_size() % 16 == 0 for s in strides[1:])


def _aligned(t: Tensor) -> Tensor:
    if _is_aligned(t):
        return t
    if t.stride(-2) == 1:
        return _aligned(t.mT).mT
    return _wide_empty(t, *t.shape).copy_(t)


def _wide_empty(like: Tensor, *shape: int) -> Tensor:
    """Return an empty tensor whose rows begin at multiples of 16 bytes, as `F.grouped_mm` returns."""
    step = 16 // like.element_size()
    return like.new_empty(*shape[:-1], -(-shape[-1] // step) * step)[..., : shape[-1]]


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor, filled: int = 0) -> Tensor:
    shape = (len(x), weight.shape[1])
    return _wide_empty(x, *shape) if _takes_kernel(x, weight) else x.new_empty(shape)


@grouped_mm_wgrad.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor, filled: int = 0) -> Tensor:
    shape = (len(ends), left.shape[1], right.shape[1])
    return _wide_empty(left, *shape) if _takes_kernel(left, right) else left.new_empty(shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.filled = inputs
    ctx.save_for_backward(*tensors)


def _rows_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
    x, weight, ends = ctx.saved_tensors
    blocks = ends, ctx.filled
    return grouped_mm(grad, weight.mT, *blocks), grouped_mm_wgrad(grad, x, *blocks), None, None


def _blocks_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
    left, right, ends = ctx.saved_tensors
    blocks = ends, ctx.filled
    return grouped_mm(right, grad, *blocks), grouped_mm(left, grad.mT, *blocks), None, None


grouped_mm.register_autograd(_rows_backward, setup_context=_save)
grouped_mm_wgrad.register_autograd(_blocks_backward, setup_context=_save)
