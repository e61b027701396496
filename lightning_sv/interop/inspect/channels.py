"""Sums of squares of a matrix's columns or rows, over blocks, so that no matrix is in memory as a whole."""

import math
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise, product

import torch
from torch import Tensor

#: of numbers in a block
BLOCK = 2**20

#: (leading indices, first row, row after the last) -> these rows of a matrix
ReadRows = Callable[[tuple[int, ...], int, int], Tensor]


def channel_squares(read: ReadRows, shape: tuple[int, ...], axis: int, widths: tuple[int, ...]) -> list[Tensor]:
    r"""||w_j||^2 = \sum_i W_ij^2 of the channels j along `axis`, for each of the matrices that a weight holds.

    Args:
        read: gives rows of the last two axes
        shape: of the weight, (*lead, rows, columns)
        axis: -1 or -2, along which the channels lie
        widths: along the other axis, of the matrices that lie there one after the other

    Returns:
        for each width (*lead, channels), float64
    """
    lead, rows, columns = shape[:-2], shape[-2], shape[-1]
    bounds = list(pairwise(accumulate(widths, initial=0)))
    out = [torch.zeros(*lead, shape[axis], dtype=torch.float64) for _ in widths]
    for index in product(*map(range, lead)):
        if axis == -1:
            for total, (low, high) in zip(out, bounds, strict=True):
                for start, end in _blocks(low, high, columns):
                    total[index] += _squares(read(index, start, end)).sum(0)
        else:
            for start, end in _blocks(0, rows, columns):
                squares = _squares(read(index, start, end))
                for total, (low, high) in zip(out, bounds, strict=True):
                    total[index][start:end] = squares[:, low:high].sum(1)
    return out


def _squares(block: Tensor) -> Tensor:
    return block.float().square()


def _blocks(low: int, high: int, columns: int) -> Iterator[tuple[int, int]]:
    step = max(1, math.ceil(BLOCK / max(1, columns)))
    return ((start, min(start + step, high)) for start in range(low, high, step))


def in_memory(weight: Tensor) -> ReadRows:
    """Return a reader of a tensor, which may be mapped from a file."""
    return lambda index, start, end: weight[index][start:end]
