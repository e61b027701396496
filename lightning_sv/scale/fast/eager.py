"""Helpers of hand-written derivatives: where they run, row chunks, second derivatives."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from lightning_sv.scale.shapes import Float

#: Elements per chunk, by device type; other devices do not use chunks. A few tensors of this size
#: fit in a core's cache and are large enough to hide the overhead of an operation.
CHUNK_ELEMENTS = {"cpu": 1 << 16}


def uses_definition() -> bool:
    """Return True in compiled or traced code, without gradients, and in torch.func.

    torch.jit.trace compares its result with a pass without gradients.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return True
    return not torch.is_grad_enabled() or inside_torch_func()


def inside_torch_func() -> bool:
    """Return True inside transforms of torch.func, which reject autograd functions of this form."""
    return torch._C._are_functorch_transforms_active()


def row_chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same rows of every tensor (rows, ...), chunk by chunk.

    All rows are one chunk on a GPU and in compiled code.
    """
    first = tensors[0]
    n_rows = max(len(first), 1)
    limit = CHUNK_ELEMENTS.get(first.device.type)
    if limit is not None and not torch.compiler.is_compiling():
        elements_per_row = max(first[:1].numel(), 1)
        n_rows = max(limit // elements_per_row, 1)
    return zip(*(t.split(n_rows) for t in tensors), strict=True)


@contextmanager
def unchunked() -> Iterator[None]:
    """Disable chunks, as on a GPU, to count a GPU's memory on a CPU."""
    saved = CHUNK_ELEMENTS.copy()
    CHUNK_ELEMENTS.clear()
    try:
        yield
    finally:
        CHUNK_ELEMENTS.update(saved)


def definition_gradients(
    definition: Callable[..., Tensor], inputs: Sequence[Tensor | None], grad: Tensor
) -> list[Tensor | None]:
    """Return the gradients of definition(*inputs), given that of its result, differentiably.

    A hand-written backward pass is itself differentiated if gradients are enabled in it
    (`create_graph`); it returns these gradients then. An input of None has no gradient.
    """
    with torch.enable_grad():
        # Views, so that an input computed from a different input is independent of it.
        views = [None if t is None else t.view_as(t) for t in inputs]
        trained = [view for view in views if view is not None and view.requires_grad]
        gradients = torch.autograd.grad(
            definition(*views), trained, grad, create_graph=True, allow_unused=True
        )
    gradient_of: dict[Tensor | None, Tensor | None] = dict(zip(trained, gradients, strict=True))
    return [gradient_of.get(view) for view in views]


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context for backward passes, whose float32 products autocast would round."""
    if x.is_meta:  # torch has no autocast for meta
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def rows_of(x: Float[Tensor, "... d"]) -> Float[Tensor, "rows d"]:
    """Return (..., d) as (rows, d); a single vector is one row."""
    return x.reshape(-1, x.shape[-1])
