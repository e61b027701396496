"""Axes of a value in what is computed of it, from shapes and strides.

The graph has no names of axes, but a view shows by its strides which axes it was made of:

    q (5, 32), strides (32, 1)
      -> view (5, 4, 8), strides (32, 8, 1)         axis 1 is heads and channels of a head
      -> transpose (4, 5, 8), strides (8, 32, 1)    the same axes, elsewhere
"""

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
    found = set()
    for axis in range(len(view.shape)):
        begin, end = _span(view, axis)
        is_repeated = view.stride[axis] == 0 and view.shape[axis] > 1
        if is_repeated:  # such an axis corresponds to all
            found.add(axis)
        for source_axis in axes:
            source_begin, source_end = _span(source, source_axis)
            if max(begin, source_begin) < min(end, source_end):
                found.add(axis)
    return frozenset(found)


def _span(value: Node, axis: int) -> tuple[int, int]:
    """Return the steps in memory that an axis covers, [1 step, all steps); empty for one entry."""
    step = value.stride[axis]
    return step, step * value.shape[axis]


def varying_axes(factor: Node, result: Node) -> frozenset[int]:
    """Return the axes of a result along which a factor that is broadcast to it varies."""
    shift = len(result.shape) - len(factor.shape)
    varying = set()
    for axis, size in enumerate(factor.shape):
        if size > 1:
            varying.add(axis + shift)
    return frozenset(varying)
