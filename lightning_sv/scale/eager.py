"""Helpers of autograd functions with hand-written derivatives: where they run, row chunks, second derivatives."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

#: Elements per chunk, by device type; other devices do not use chunks. A few tensors of this size fit in a core's cache
#: and are large enough to hide the overhead of an operation.
CHUNK_ELEMENTS = {"cpu": 1 << 16}


def uses_reference() -> bool:
    """Return True if the definitions must run: in compiled or traced code, without gradients, in torch.func.

    torch.jit.trace compares its result with a pass without gradients.
    """
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
    return traced or not torch.is_grad_enabled() or inside_torch_func()


def inside_torch_func() -> bool:
    """Return True inside transforms of torch.func, which reject autograd functions of this form."""
    return torch._C._are_functorch_transforms_active()


def row_chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same rows of every tensor (rows, ...), chunk by chunk; all at once on a GPU or in compiled code."""
    first = tensors[0]
    n = max(len(first), 1)
    size = CHUNK_ELEMENTS.get(first.device.type)
    if size is not None and not torch.compiler.is_compiling():
        n = max(size // max(first[:1].numel(), 1), 1)
    return zip(*(t.split(n) for t in tensors), strict=True)


@contextmanager
def unchunked() -> Iterator[None]:
    """Disable chunks, as on a GPU, to count a GPU's memory on a CPU."""
    saved = CHUNK_ELEMENTS.copy()
    CHUNK_ELEMENTS.clear()
    try:
        yield
    finally:
        CHUNK_ELEMENTS.update(saved)


def reference_gradients(
    plain: Callable[..., Tensor], inputs: Sequence[Tensor | None], grad: Tensor
) -> list[Tensor | None]:
    """Return the gradients of plain(*inputs), given that of its result, as a differentiable function.

    Call it from the backward pass of a hand-written function if gradients are enabled there (`create_graph`). An input
    of None has no gradient.
    """
    with torch.enable_grad():
        # Views, so that an input computed from a different input counts as independent of it.
        views = [None if t is None else t.view_as(t) for t in inputs]
        differentiable = [t for t in views if t is not None and t.requires_grad]
        gradients = iter(torch.autograd.grad(plain(*views), differentiable, grad, create_graph=True, allow_unused=True))
        return [next(gradients) if t is not None and t.requires_grad else None for t in views]
