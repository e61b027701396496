"""Rows of several tensors a piece at a time, so that a CPU finds in its cache what it has just made."""

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

#: elements of a piece: a few tensors of it fit in a core's cache, and the overhead of its operations is not felt
PIECE = 1 << 16


def pieces(*tensors: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Yield the same rows of every tensor; all of them at once on a GPU, and where it is compiled.

    Args:
        *tensors: (rows, ...), the first one the widest; for None, every piece has None
    """
    first = tensors[0]
    assert first is not None
    n = max(len(first), 1)
    if first.device.type == "cpu" and not torch.compiler.is_compiling():
        n = max(PIECE // max(first[:1].numel(), 1), 1)
    return zip(*(repeat(None) if t is None else t.split(n) for t in tensors), strict=False)
