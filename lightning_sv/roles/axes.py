"""Axes of a value in what is computed of it, from shapes and strides.

The graph has no names of axes, but a view shows by its strides which axes it was made of:

    q (5, 32), strides (32, 1)
      -> view (5, 4, 8), strides (32, 8, 1)         axis 1 is heads and channels of a head
      -> transpose (4, 5, 8), strides (8, 32, 1)    the same axes, elsewhere
"""

from typing import NamedTuple

from lightning_sv.roles.graph import Node


def moved(source: Node, result: Node, axes: frozenset[int]) -> frozenset[int]:
    """Return the axes of `result`, a view or an elementwise result, that have `axes` of `source`.

    An axis of a view has the axes of the source whose strides it covers, possibly several:

        source (2, 12), strides (12, 1)  ->  view (2, 3, 4), strides (12, 4, 1): axis 1 -> 1 and 2
    """
    if result.is_view:
        return _axes_of_view(source, result, axes)
    shift = len(result.shape) - len(source.shape)
    shifted = {axis + shift for axis in axes}
    return frozenset(shifted.intersection(range(len(result.shape))))


def _axes_of_view(source: Node, view: Node, axes: frozenset[int]) -> frozenset[int]:
    spans = [_Span.of(source, axis) for axis in axes]
    found = set()
    for axis, step in enumerate(view.stride):
        span = _Span.of(view, axis)
        is_broadcast = step == 0  # such an axis corresponds to all
        if span.size > 1 and (is_broadcast or any(map(span.overlaps, spans))):
            found.add(axis)
    return frozenset(found)


class _Span(NamedTuple):
    """Positions in memory between neighbours along an axis, and from its start to its end."""

    size: int
    step: int
    end: int

    @classmethod
    def of(cls, value: Node, axis: int) -> "_Span":
        """Return the span of one axis."""
        size = value.shape[axis]
        step = value.stride[axis]
        return cls(size, step, end=step * size)

    def overlaps(self, source: "_Span") -> bool:
        """Return True if the axis has steps of an axis of the source."""
        is_axis = source.size > 1 and source.step > 0
        return is_axis and source.step < self.end and self.step < source.end


def varying_axes(factor: Node, result: Node) -> frozenset[int]:
    """Return the axes of a result along which a factor that is broadcast to it varies."""
    shift = len(result.shape) - len(factor.shape)
    return frozenset(axis + shift for axis, size in enumerate(factor.shape) if size > 1)
