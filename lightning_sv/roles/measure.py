"""Linearity of an operation on one tensor, measured on random numbers."""

from typing import Any

import torch
from torch import Tensor

from lightning_sv.roles.trace import Node

_PLAIN = (int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


def is_measurable(node: Node) -> bool:
    """Whether an operation is one of torch's own on one tensor and plain numbers, so that it may be run again."""
    return (
        node.call is not None
        and "::" not in node.op
        and len(node.inputs) == 1
        and all(isinstance(item, _PLAIN) for value in node.scalars.values() for item in _items(value))
    )


def channels_of_result(node: Node, channels: frozenset[int]) -> frozenset[int] | None:
    """Return the axes along which channels lie in the result of a linear operation that leaves them apart.

    f is run on random x and y, and on both with random factors g of the channels. It is linear if
    f(2x + y) = 2 f(x) + f(y), and leaves channels apart if f(gx) = h f(x) and f(gy) = h f(y) for one h.

    Args:
        node: result of an operation for which `is_measurable`
        channels: axes of its input

    Returns:
        None if it is not linear or mixes channels
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    if node.pointwise:  # torch's linear ones are in the tables
        return None
    shape = node.inputs[0][1].shape
    draw = torch.Generator().manual_seed(0)
    with unset_fake_temporarily(), torch.no_grad():
        x, y = (torch.randn(shape, generator=draw, dtype=torch.float64, device="cpu") for _ in range(2))
        sizes = [size if axis in channels else 1 for axis, size in enumerate(shape)]
        g = torch.rand(sizes, generator=draw, dtype=torch.float64, device="cpu") + 1
        try:
            both, of_x, of_y, scaled_x, scaled_y = (_run(node, t) for t in (2 * x + y, x, y, g * x, g * y))
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return None
    results = (both, of_x, of_y, scaled_x, scaled_y)
    if any(not isinstance(t, Tensor) or not t.is_floating_point() or t.shape != of_x.shape for t in results):
        return None
    factor = torch.where(of_x == 0, 1, scaled_x / of_x)
    if not torch.allclose(both, 2 * of_x + of_y) or not torch.allclose(scaled_y, factor * of_y):
        return None
    factor = factor.where(of_x != 0, torch.nan)
    return frozenset(axis for axis in range(factor.ndim) if _varies(factor, axis))


def _run(node: Node, value: Tensor) -> Any:
    (name, _), *_ = node.inputs
    out = node.call(**{name: value.clone(), **node.scalars})
    return out[node.output] if isinstance(out, (list, tuple)) else out


def _varies(factor: Tensor, axis: int) -> bool:
    """Whether numbers differ along an axis; nan stands for any."""
    high, low = (factor.nan_to_num(nan=sign * torch.inf) for sign in (-1, 1))
    return bool((high.amax(axis) - low.amin(axis) > 1e-6).any())


def _items(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)
