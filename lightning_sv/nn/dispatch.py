"""Dispatch of tokens to experts and back: the order of the rows, gather and sum.

Four tokens a b c d that select k = 2 of 3 experts, in blocks padded to a multiple of 2 rows:

    choices        a: 0 2   b: 0 1   c: 2 0   d: 2 1
    buffer         a b c .  | b d  | a c d . | . .         '.' is a row of zeros
    expert         0        | 1    | 2       | unused

`dispatch` gathers the buffer, `combine` sums the rows of each token, and each is the other's
derivative: no scatter with atomic additions, hence deterministic. The size of the buffer is the
largest possible one, so that it does not depend on the choices, which only the device knows.

Shapes: N tokens, k choices per token, E experts, R rows of a buffer with one block per expert.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_sv.scale.fast import Rows
from lightning_sv.scale.shapes import Float, Int


class Layout(NamedTuple):
    """Position of every choice of every token in the buffer.

    Attributes:
        rows: the experts' blocks, each padded to a multiple of `block_multiple`
        source: (R,) int64, the token of each row, N for a padding row
        position: (N, k) int64, the row of each choice
    """

    rows: Rows
    source: Tensor
    position: Tensor


def block_multiple(n_choice: int, n_expert: int) -> int:
    """Return the multiple to which blocks are padded: a power of two near mean / 16, 8 to 64.

    On the CPU, bf16 kernels are cached per shape, so few distinct block sizes are faster. On CUDA,
    blocks must begin at multiples of 8.
    """
    sixteenth_of_mean = max(n_choice // n_expert // 16, 1)
    power_of_two = 1 << (sixteenth_of_mean.bit_length() - 1)  # the largest one that is not above
    return min(max(power_of_two, 8), 64)


@torch.no_grad()
def layout(experts: Int[Tensor, "N k"], n_expert: int) -> Layout:
    """Return the layout of the choices `experts` in a buffer of static size.

    The host does not wait for the choices. The choices of an expert are in token order (and in the
    order of choices if a token selects it twice).
    """
    n, k = experts.shape
    device = experts.device
    multiple = block_multiple(n * k, n_expert)
    most_rows = n * k + n_expert * (multiple - 1)
    size = -(-most_rows // multiple) * multiple

    selected, order = experts.flatten().sort(stable=True)  # (N k,), by expert
    ids = torch.arange(n_expert, device=device)
    first = torch.searchsorted(selected, ids)  # index of each expert's first choice in sorted order
    last = torch.searchsorted(selected, ids, right=True)
    padded = (last - first + multiple - 1) // multiple * multiple
    ends = padded.cumsum(0)

    begins = ends - padded
    row = torch.arange(n * k, device=device) + (begins - first)[selected]  # of each sorted choice
    source = torch.full((size,), n, device=device).scatter_(0, row, order // k)
    position = torch.empty_like(row).scatter_(0, order, row).view(n, k)
    expert = torch.searchsorted(ends, torch.arange(size, device=device), right=True)
    expert.clamp_(max=n_expert - 1)
    return Layout(Rows(expert, ends.int(), filled=n * k), source, position)


def dispatch(x: Float[Tensor, "N d"], layout: Layout) -> Float[Tensor, "R d"]:
    """Return the rows x[source], zero for rows without a token; (N, d) -> (R, d).

    In the autocast dtype if autocast is on, because the rows are inputs of products.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    return _Dispatch.apply(x, layout.source, layout.position)


def combine(y: Float[Tensor, "R d"], layout: Layout) -> Float[Tensor, "N d"]:
    """Return sum_j y[position[n, j]] of every token n, in y's dtype; (R, d) -> (N, d).

    Apply weights to the input of a linear map (`weights_by_row`), not to y: the result is the same,
    and y is not saved for their gradient.
    """
    return _Combine.apply(y, layout.source, layout.position)


def weights_by_row(weights: Float[Tensor, "N k"], layout: Layout) -> Float[Tensor, " R"]:
    """Return the weight of each row, zero for rows without a token; (N, k) -> (R,)."""
    return weights.new_zeros(len(layout.source)).scatter(
        0, layout.position.flatten(), weights.flatten()
    )


class _Dispatch(torch.autograd.Function):
    """The derivative is `_Combine`, the sum of a token's rows: a gather, hence deterministic."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, position: Tensor) -> Tensor:
        ctx.save_for_backward(source, position)
        return F.pad(x, (0, 0, 0, 1)).index_select(0, source)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _Combine.apply(grads[0], *ctx.saved_tensors), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, source: Tensor, position: Tensor) -> Tensor:
        ctx.save_for_backward(source, position)
        return F.embedding_bag(position, y, mode="sum")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _Dispatch.apply(grads[0], *ctx.saved_tensors), None, None
