"""Double backward for hand-written autograd functions, by differentiating a reference implementation."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def reference_gradients(
    plain: Callable[..., Tensor], inputs: Sequence[Tensor | None], grad: Tensor
) -> list[Tensor | None]:
    """Return the gradients of plain(*inputs), differentiable again, for backward of a hand-written function.

    Call it from backward where gradients are enabled there, which they are under `create_graph`.

    Args:
        plain: the same function of torch's own operations
        inputs: its arguments; None has no gradient
        grad: of its result
    """
    with torch.enable_grad():
        # Names of their own: an input that was made from another one is constant with respect to it here.
        own = [None if t is None else t.view_as(t) for t in inputs]
        wanted = [t for t in own if t is not None and t.requires_grad]
        found = iter(torch.autograd.grad(plain(*own), wanted, grad, create_graph=True, allow_unused=True))
        return [next(found) if t is not None and t.requires_grad else None for t in own]
