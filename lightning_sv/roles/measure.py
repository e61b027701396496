"""Operations that no table of `ops` describes, tested on random numbers.

f is linear if f(2x + y) = 2 f(x) + f(y). It keeps channels separate if channel factors g of any x
come out as the same factors h: f(g x) = h f(x) and f(g y) = h f(y). The axes along which h varies
are then those of the channels. Average pooling, interpolation and cumulative sums are found so.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from lightning_sv.roles.graph import Node

_PLAIN = (
    int,
    float,
    bool,
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    type(None),
)


def is_measurable(node: Node) -> bool:
    """Return True for an operation of torch on one tensor and plain values, which can run again."""
    of_torch = node.call is not None and "::" not in node.op
    return of_torch and len(node.inputs) == 1 and all(map(_is_plain, node.scalars.values()))


def _is_plain(value: Any) -> bool:
    items = value if isinstance(value, (list, tuple)) else (value,)
    return all(isinstance(item, _PLAIN) for item in items)


def channels_of_result(node: Node, channels: frozenset[int]) -> frozenset[int] | None:
    """Return the axes of the channels in the result of a measurable operation.

    None if it is not linear, mixes channels, or cannot run.
    """
    if node.pointwise:  # linear pointwise operations are in the tables
        return None
    with unset_fake_temporarily(), torch.no_grad():
        try:
            results = list(_results(node, channels))
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return None
    of_x = results[1]
    is_measured = all(_is_alike(result, of_x) for result in results)
    return _axes_of_factor(*results) if is_measured else None


def _axes_of_factor(
    of_sum: Tensor, of_x: Tensor, of_y: Tensor, of_scaled_x: Tensor, of_scaled_y: Tensor
) -> frozenset[int] | None:
    """Return the axes of h in f(g x) = h f(x); None if f is not linear or mixes channels."""
    factor = torch.where(of_x == 0, 1, of_scaled_x / of_x)
    is_linear = torch.allclose(of_sum, 2 * of_x + of_y)
    is_separate = torch.allclose(of_scaled_y, factor * of_y)
    if not is_linear or not is_separate:
        return None
    known = factor.where(of_x != 0, torch.nan)
    return frozenset(axis for axis in range(known.ndim) if _varies(known, axis))


def _results(node: Node, channels: frozenset[int]) -> Iterator[Any]:
    """Yield f(2x + y), f(x), f(y), f(g x), f(g y)."""
    shape = node.first.shape
    sizes = [size if axis in channels else 1 for axis, size in enumerate(shape)]
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=draw, dtype=torch.float64, device="cpu")
    y = torch.randn(shape, generator=draw, dtype=torch.float64, device="cpu")
    g = torch.rand(sizes, generator=draw, dtype=torch.float64, device="cpu") + 1
    for value in (2 * x + y, x, y, g * x, g * y):
        yield _run(node, value)


def _run(node: Node, value: Tensor) -> Any:
    (use,) = node.inputs
    out = node.call(**{use.argument: value.clone(), **node.scalars})
    if isinstance(out, (list, tuple)):
        return out[node.output]
    return out


def _is_alike(result: Any, other: Any) -> bool:
    is_numbers = isinstance(result, Tensor) and result.is_floating_point()
    return is_numbers and result.shape == other.shape


def _varies(factor: Tensor, axis: int) -> bool:
    """Return True if values differ along an axis; nan matches any value."""
    high = factor.nan_to_num(nan=-torch.inf).amax(axis)
    low = factor.nan_to_num(nan=torch.inf).amin(axis)
    return bool((high - low > 1e-6).any())
