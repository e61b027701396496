"""Sums of squares |w_j|^2 of a matrix's channels, read in blocks of rows.

A weight of 70 billion parameters does not fit into memory, and neither need its largest matrix:

    axis -1: the channels are columns      axis -2: the channels are rows
      block  . . . . .                       block  . . . . . -> |w_0|^2, |w_1|^2
             . . . . .                              . . . . .
             | | | | |  added up             block  . . . . . -> |w_2|^2, ...
      block  . . . . .

Matrices that are concatenated in one weight (queries, keys and values) have sums of their own.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, pairwise, product

import torch
from torch import Tensor

#: entries per block
BLOCK = 2**20

#: (leading indices, first row, row after the last) -> these rows of a matrix
ReadRows = Callable[[tuple[int, ...], int, int], Tensor]


def channel_squares(
    read: ReadRows, shape: tuple[int, ...], axis: int, widths: tuple[int, ...] = ()
) -> list[Tensor]:
    r"""Return ||w_j||^2 = \sum_i W_ij^2 of the channels j along `axis`, per matrix in a weight.

    Args:
        read: returns rows of the last two axes
        shape: shape of the weight, (*lead, rows, columns)
        axis: -1 or -2
        widths: those of the matrices concatenated along the other axis, by default one

    Returns:
        (*lead, channels) per matrix, float64.
    """
    *lead, rows, columns = shape
    channels_are_columns = axis == -1
    if not widths:
        widths = (rows,) if channels_are_columns else (columns,)
    bounds = list(pairwise(accumulate(widths, initial=0)))
    totals = [torch.zeros(*lead, shape[axis], dtype=torch.float64) for _ in widths]
    for index in product(*map(range, lead)):
        views = [total[index] for total in totals]  # (channels,) each
        read_rows = partial(read, index)
        if channels_are_columns:
            _add_squares_of_columns(views, read_rows, bounds, columns)
        else:
            _set_squares_of_rows(views, read_rows, bounds, (rows, columns))
    return totals


def _add_squares_of_columns(
    totals: list[Tensor],
    read: Callable[[int, int], Tensor],
    bounds: list[tuple[int, int]],
    columns: int,
) -> None:
    """Add the squares of each column; the matrices are below each other."""
    for total, (low, high) in zip(totals, bounds, strict=True):
        for start, end in _blocks(low, high, columns):
            total += read(start, end).float().square().sum(0)


def _set_squares_of_rows(
    totals: list[Tensor],
    read: Callable[[int, int], Tensor],
    bounds: list[tuple[int, int]],
    size: tuple[int, int],
) -> None:
    """Set the squares of each row; the matrices are next to each other."""
    for start, end in _blocks(0, *size):
        squares = read(start, end).float().square()
        for total, (low, high) in zip(totals, bounds, strict=True):
            total[start:end] = squares[:, low:high].sum(1)


def _blocks(low: int, high: int, columns: int) -> Iterator[tuple[int, int]]:
    step = max(1, math.ceil(BLOCK / max(1, columns)))
    for start in range(low, high, step):
        yield start, min(start + step, high)
