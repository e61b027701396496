"""Rows of several tensors a piece at a time, so that a CPU finds in its cache what it has just made."""

from collections.abc import Iterator

import torch
from torch import Tensor

#: elements of a piece: a few tensors of it fit in a core's cache, and the overhead of its operations is not felt
PIECE = 1 << 16


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same rows of every tensor; all of them at once on a GPU, and where it is compiled.

    Args:
        *tensors: (rows, ...), the first one the widest
    """
    first = tensors[0]
    n = max(len(first), 1)
    if first.device.type == "cpu" and not torch.compiler.is_compiling():
        n = max(PIECE // max(first[:1].numel(), 1), 1)
    return zip(*(t.split(n) for t in tensors), strict=True)
