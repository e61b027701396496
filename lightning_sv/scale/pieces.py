"""Rows of several tensors a piece at a time, so that a CPU finds in its cache what it has just made."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

#: elements of a piece: a few tensors of it fit in a core's cache, and the overhead of its operations is not felt
PIECE = 1 << 16
#: what `first_piece_alone` sets
_FIRST_ALONE = {"now": False}


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same rows of every tensor; all of them at once on a GPU, and where it is compiled.

    Args:
        *tensors: (rows, ...), the first one the widest
    """
    first = tensors[0]
    n = max(len(first), 1)
    if first.device.type == "cpu" and not torch.compiler.is_compiling():
        n = max(PIECE // max(first[:1].numel(), 1), 1)
    if _FIRST_ALONE["now"]:
        return iter([tuple(t[:n] for t in tensors)])
    return zip(*(t.split(n) for t in tensors), strict=True)


@contextmanager
def first_piece_alone() -> Iterator[None]:
    """Let `pieces` yield the largest piece alone, for tensors that have shapes and no values.

    The others free what they take before the next one, so that memory is the same, and a step of Llama-1B has 70,000.
    """
    _FIRST_ALONE["now"] = True
    try:
        yield
    finally:
        _FIRST_ALONE["now"] = False
