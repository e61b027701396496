"""Grouped matrix products: one matrix per expert, with rows sorted by expert.

Both are custom operators, opaque to torch.compile, and each is the other's derivative. Weights are not padded; padding
for a kernel is added at the call.

Shapes: R rows of the buffer, E experts; ends (E,) int32 is the end of each expert's block, ends[-1] >= `filled`.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


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
