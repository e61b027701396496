"""Iterate over several tensors in chunks of rows that fit the CPU cache."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

#: Elements per chunk, by device type; other devices do not use chunks. A few tensors of this size fit in a core's cache
#: and are large enough to hide the overhead of an operation.
CHUNK_ELEMENTS = {"cpu": 1 << 16}


def row_chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same rows of every tensor, chunk by chunk; all rows at once on a GPU or in compiled code.

    Args:
        *tensors: (rows, ...), all with the same number of rows
    """
    first = tensors[0]
    n = max(len(first), 1)
    size = CHUNK_ELEMENTS.get(first.device.type)
    if size is not None and not torch.compiler.is_compiling():
        n = max(size // max(first[:1].numel(), 1), 1)
    return zip(*(t.split(n) for t in tensors), strict=True)


@contextmanager
def unchunked(*sizes: dict[str, int]) -> Iterator[None]:
    """Disable chunks, as on a GPU, to count a GPU's memory on a CPU.

    Args:
        *sizes: `CHUNK_ELEMENTS`, and similar tables of other modules, by device type
    """
    saved = [table.copy() for table in sizes]
    try:
        for table in sizes:
            table.clear()
        yield
    finally:
        for table, entries in zip(sizes, saved, strict=True):
            table.update(entries)
