"""Products with one matrix per expert.

    y[r] = gamma_out[e] * (W[e] (gamma_in[e] * x[r]))       e the expert of row r

All rows are in one buffer, sorted by expert, so that a product over all experts is one call:

    row      0 ......... ends[0] ......... ends[1] ......... ends[-1] ......... R
    content  | expert 0          | expert 1          | ...            | unused, zero

Each block ends with padding rows of zeros. Only `ends`, on the device, has the sizes; reading it
there would stop the host until the router has finished. `grouped_mm` and `grouped_mm_wgrad` are
custom operators, opaque to torch.compile, and each is the other's derivative. Weights are not
padded; padding for a kernel is added at the call.

Folding (fast/fold.py) costs O(E d_out d_in). Experts with few rows are cheaper with scaled
activations, see `FOLD_FROM`.

Shapes: R rows of the buffer, E experts; ends (E,) int32 is the end of each expert's block, ends[-1]
>= `filled`.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_sv.scale.definitions import effective_weight, product_dtype
from lightning_sv.scale.fast.eager import without_autocast
from lightning_sv.scale.fast.fold import effective_weight_gradients

#: Fold the weights from this many scaled activations (both sides) per weight entry; below, scale
#: the activations: break-even on a CPU at 30 rows per expert for 128 x 88, at 100 for 256 x 352.
FOLD_FROM = 0.7
#: `F.grouped_mm` requires strides of a multiple of this many bytes.
ALIGNMENT = 16


class Rows(NamedTuple):
    """Assignment of a buffer's rows to experts.

    Attributes:
        expert: (R,) int64, expert of each row; E - 1 for rows after the last block, which are zero
            and never read
        ends: (E,) int32, end of each block; blocks begin at 0, ends[0], ends[1], ...
        filled: lower bound of the number of assigned rows, known without reading `ends`
    """

    expert: Tensor
    ends: Tensor
    filled: int = 0


def grouped_product(
    x: Tensor, weight: Tensor, gamma_in: Tensor | None, gamma_out: Tensor | None, rows: Rows
) -> Tensor:
    """Return gamma_out[e] * (W[e] (gamma_in[e] * x[r])) for every row r, e = rows.expert[r].

    Rows from rows.ends[-1] on are zero and have zero gradients; an expert without rows has zero
    gradients. Autograd saves x, the weight and the gammas, without folded, cast or padded copies.

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
    """Saves only its inputs. Twice differentiable, like its backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        expert: Tensor,
        ends: Tensor,
        filled: int,
        dtype: torch.dtype,
        *factors: Any,
    ) -> Tensor:
        ctx.save_for_backward(x, expert, ends, *factors)
        ctx.filled = filled
        ctx.dtype = dtype
        return _scaled_product(x, *factors, rows=Rows(expert, ends, filled), dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, expert, ends, weight, gamma_in, gamma_out = ctx.saved_tensors
        grad = grads[0].to(ctx.dtype)
        grad_x: Tensor | None = None
        factor_gradients: tuple[Tensor | None, ...] = (None, None, None)
        with without_autocast(x):
            if ctx.needs_input_grad[0]:
                # The transposed map: W^T, with the vectors in exchanged places.
                rows = Rows(expert, ends, ctx.filled)
                grad_x = _scaled_product(
                    grad, weight.mT, gamma_out, gamma_in, rows=rows, dtype=ctx.dtype
                ).to(x.dtype)
            if any(ctx.needs_input_grad[5:]):
                grad_folded = grouped_mm_wgrad(grad, x.to(ctx.dtype), ends, ctx.filled)
                factor_gradients = effective_weight_gradients(
                    grad_folded.to(weight.dtype), weight, gamma_in, gamma_out
                )
        return grad_x, None, None, None, None, *factor_gradients


def _scaled_product(
    x: Tensor,
    weight: Tensor,
    gamma_in: Tensor | None,
    gamma_out: Tensor | None,
    *,
    rows: Rows,
    dtype: torch.dtype,
) -> Tensor:
    d_out, d_in = weight.shape[1:]
    if len(x) * (d_out + d_in) >= FOLD_FROM * weight.numel():
        folded = effective_weight(weight, gamma_in, gamma_out).to(dtype)
        return grouped_mm(x.to(dtype), folded, rows.ends, rows.filled)

    if gamma_in is not None:
        x = x * gamma_in[rows.expert]  # (R, d_in)
    y: Tensor = grouped_mm(x.to(dtype), weight.to(dtype), rows.ends, rows.filled)
    if gamma_out is not None:
        y = (y * gamma_out[rows.expert]).to(dtype)  # (R, d_out)
    return y


@torch.library.custom_op("lightning_sv::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor, filled: int = 0) -> Tensor:
    """Return W[e] x[r] of each row, zero after the last block.

    (R, d_in) and (E, d_out, d_in) -> (R, d_out).
    """
    if _takes_kernel(x, weight):
        y = F.grouped_mm(_aligned(x), _aligned(weight).mT, offs=ends)
    else:
        y = x.new_empty(len(x), weight.shape[1])
        for (begin, end), transposed in zip(_blocks(ends), weight.mT.unbind(), strict=True):
            torch.mm(x[begin:end], transposed, out=y[begin:end])

    if x.is_cuda:
        zero_tail_without_sync(y, ends, filled)
    else:
        y[int(ends[-1]) :].zero_()
    return y


@torch.library.custom_op("lightning_sv::grouped_mm_wgrad", mutates_args=())
def grouped_mm_wgrad(left: Tensor, right: Tensor, ends: Tensor, filled: int = 0) -> Tensor:
    """Return left[block]^T right[block] of each block.

    (R, d_left) and (R, d_right) -> (E, d_left, d_right).
    """
    if _takes_kernel(left, right):
        return F.grouped_mm(_aligned(left).mT, _aligned(right), offs=ends)
    out = left.new_empty(len(ends), left.shape[1], right.shape[1])
    for (begin, end), product in zip(_blocks(ends), out.unbind(), strict=True):
        torch.mm(left[begin:end].mT, right[begin:end], out=product)
    return out


def zero_tail_without_sync(y: Tensor, ends: Tensor, filled: int) -> None:
    """Zero the rows from ends[-1] >= filled on; the host does not wait for `ends`."""
    rows = torch.arange(filled, len(y), device=y.device)
    is_unused = (rows >= ends[-1]).unsqueeze(-1)
    y[filled:].masked_fill_(is_unused, 0)


def _blocks(ends: Tensor) -> list[tuple[int, int]]:
    """Return (begin, end) of each expert's rows."""
    return list(pairwise([0, *ends.tolist()]))


def _takes_kernel(a: Tensor, b: Tensor) -> bool:
    """Return True if `F.grouped_mm` is used.

    On CUDA only for bf16 (the only dtype before torch 2.12), to avoid a host synchronization. On
    the CPU only if no padding is needed, because the loop over experts is almost as fast.
    """
    if a.is_cuda:
        return a.dtype == torch.bfloat16
    if a.dtype not in (torch.float32, torch.bfloat16):
        return False
    return _is_aligned(a) and _is_aligned(b)


def _is_aligned(t: Tensor) -> bool:
    """Return True if the smallest stride is 1 and the others are multiples of 16 bytes."""
    smallest, *others = sorted(t.stride())
    return smallest == 1 and all(stride * t.element_size() % ALIGNMENT == 0 for stride in others)


def _aligned(t: Tensor) -> Tensor:
    """Return t, or a copy of it whose strides `F.grouped_mm` accepts."""
    if _is_aligned(t):
        return t
    if t.stride(-2) == 1:  # transposed
        return _aligned(t.mT).mT
    return _aligned_empty(t, *t.shape).copy_(t)


def _aligned_empty(like: Tensor, *shape: int) -> Tensor:
    """Return an empty tensor with rows at multiples of 16 bytes, as `F.grouped_mm` returns."""
    step = ALIGNMENT // like.element_size()
    width = shape[-1]
    padded_width = -(-width // step) * step
    return like.new_empty(*shape[:-1], padded_width)[..., :width]


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor, filled: int = 0) -> Tensor:
    shape = (len(x), weight.shape[1])
    return _aligned_empty(x, *shape) if _takes_kernel(x, weight) else x.new_empty(shape)


@grouped_mm_wgrad.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor, filled: int = 0) -> Tensor:
    shape = (len(ends), left.shape[1], right.shape[1])
    return _aligned_empty(left, *shape) if _takes_kernel(left, right) else left.new_empty(shape)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.filled = inputs
    ctx.save_for_backward(*tensors)


def _grouped_mm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
    x, weight, ends = ctx.saved_tensors
    grad_x = grouped_mm(grad, weight.mT, ends, ctx.filled)
    grad_weight = grouped_mm_wgrad(grad, x, ends, ctx.filled)
    return grad_x, grad_weight, None, None


def _grouped_mm_wgrad_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
    left, right, ends = ctx.saved_tensors
    grad_left = grouped_mm(right, grad, ends, ctx.filled)
    grad_right = grouped_mm(left, grad.mT, ends, ctx.filled)
    return grad_left, grad_right, None, None


grouped_mm.register_autograd(_grouped_mm_backward, setup_context=_save_inputs)
grouped_mm_wgrad.register_autograd(_grouped_mm_wgrad_backward, setup_context=_save_inputs)
