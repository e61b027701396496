"""Double backward for hand-written autograd functions, by differentiating a reference implementation."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def reference_gradients(
    plain: Callable[..., Tensor], inputs: Sequence[Tensor | None], grad: Tensor
) -> list[Tensor | None]:
    """Return the gradients of plain(*inputs) as a differentiable function.

    Call it from the backward pass of a hand-written function if gradients are enabled there (`create_graph`).

    Args:
        plain: reference implementation in torch operations
        inputs: arguments of the function; None has no gradient
        grad: gradient of the result
    """
    with torch.enable_grad():
        # Views, so that an input computed from a different input counts as independent of it.
        views = [None if t is None else t.view_as(t) for t in inputs]
        differentiable = [t for t in views if t is not None and t.requires_grad]
        gradients = iter(torch.autograd.grad(plain(*views), differentiable, grad, create_graph=True, allow_unused=True))
        return [next(gradients) if t is not None and t.requires_grad else None for t in views]
