"""Axes of the channels through views, products, and operations that are measured on random inputs."""

from typing import Any

import torch
from torch import Tensor

from lightning_sv.roles.ops import PRODUCTS
from lightning_sv.roles.trace import Node

_PLAIN = (int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


def contraction(product: Node, name: str, operand: Node) -> int:
    """Return the axis of `operand`, argument `name` of `product`, that the product sums over."""
    _, matrix, *_ = PRODUCTS[product.op]
    axes = len(operand.shape)
    if "convolution" in product.op:
        return 1
    if axes == 1 or name != matrix or product.op == "linear" or product.op.startswith("mkldnn"):
        return axes - 1
    return axes - 2


def moved(source: Node, result: Node, axes: frozenset[int]) -> frozenset[int]:
    """Return the axes of `result`, a view or an elementwise result, that correspond to `axes` of `source`.

    In a view by strides, an axis of the view corresponds to the axes of the source whose strides it covers, possibly
    several. Broadcast axes (stride 0) correspond to all requested axes.
    """
    if not result.is_view:
        shift = len(result.shape) - len(source.shape)
        return frozenset(axis + shift for axis in axes if axis + shift >= 0)
    spans = {i: (s, s * n) for i, (s, n) in enumerate(zip(source.stride, source.shape, strict=True)) if n > 1}
    result_axes = set()
    for axis, (step, size) in enumerate(zip(result.stride, result.shape, strict=True)):
        if size == 1:
            continue
        if step == 0:
            result_axes.add(axis)
            continue
        covered = {i for i, (low, high) in spans.items() if low < step * size and high > step and low > 0}
        # a broadcast axis corresponds to all
        covered -= {i for i in covered if source.stride[i] == 0}
        if covered & axes:
            result_axes.add(axis)
    return frozenset(result_axes)


def is_measurable(node: Node) -> bool:
    """Return True for an operation of torch on one tensor and plain values, which can be run again."""
    return (
        node.call is not None
        and "::" not in node.op
        and len(node.inputs) == 1
        and all(
            isinstance(item, _PLAIN)
            for value in node.scalars.values()
            for item in (value if isinstance(value, (list, tuple)) else (value,))
        )
    )


def channels_of_result(node: Node, channels: frozenset[int]) -> frozenset[int] | None:
    """Return the axes of the channels in the result of a linear operation that does not mix them.

    The operation f is run on random x and y, and on both with random channel factors g. It is linear if
    f(2x + y) = 2 f(x) + f(y), and keeps channels separate if f(gx) = h f(x) and f(gy) = h f(y) for the same h.

    Args:
        node: result of an operation for which `is_measurable` is True
        channels: axes of its input

    Returns:
        The axes, or None if the operation is not linear or mixes channels.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    if node.pointwise:  # linear pointwise operations are in the tables
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
    """Return True if values differ along an axis; nan matches any value."""
    high, low = (factor.nan_to_num(nan=sign * torch.inf) for sign in (-1, 1))
    return bool((high.amax(axis) - low.amin(axis) > 1e-6).any())
