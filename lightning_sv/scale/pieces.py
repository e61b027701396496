"""Rows of several tensors a piece at a time, so that a CPU finds in its cache what it has just made."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

#: elements of a piece, by type of device; elsewhere a piece has all rows. On a CPU a few tensors of it fit in a core's
#: cache, and the overhead of its operations is not felt
PIECE = {"cpu": 1 << 16}


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same rows of every tensor, a piece at a time; all at once elsewhere than on a CPU, and compiled.

    Args:
        *tensors: (rows, ...), all with the same number of rows
    """
    first = tensors[0]
    n = max(len(first), 1)
    size = PIECE.get(first.device.type)
    if size is not None and not torch.compiler.is_compiling():
        n = max(size // max(first[:1].numel(), 1), 1)
    return zip(*(t.split(n) for t in tensors), strict=True)


@contextmanager
def as_on_a_gpu(*sizes: dict[str, int]) -> Iterator[None]:
    """Empty tables of sizes by type of device: what they cut is cut as on a GPU, to count the memory of one.

    Args:
        *sizes: `PIECE`, and those of other modules
    """
    kept = [table.copy() for table in sizes]
    try:
        for table in sizes:
            table.clear()
        yield
    finally:
        for table, entries in zip(sizes, kept, strict=True):
            table.update(entries)
