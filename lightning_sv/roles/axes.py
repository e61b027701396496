"""Axes of a value in what is computed of it, from shapes and strides.

The graph has no names of axes, but a view shows by its strides which axes it was made of:

    q (5, 32), strides (32, 1)
      -> view (5, 4, 8), strides (32, 8, 1)         axis 1 is heads and channels of a head
      -> transpose (4, 5, 8), strides (8, 32, 1)    the same axes, elsewhere
      -> slice, cat, rotated halves                 followed by their positions along the axis
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import lightning_sv.roles.ops as ops
from lightning_sv.roles.graph import Node
from lightning_sv.roles.types import agreed


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


class Block(NamedTuple):
    """Positions of a part along an axis."""

    begin: int
    end: int
    step: int = 1


def block_of(part: Node, n: int) -> Block:
    """Return the positions of a part of an axis of size n."""
    scalars = part.scalars
    if part.op == "unbind":
        return Block(part.output, part.output + 1)
    if part.op == "select":
        begin = int(scalars["index"]) % n
        return Block(begin, begin + 1)
    if part.op == "slice":
        bounds = slice(scalars.get("start"), scalars.get("end"), scalars.get("step"))
        return Block(*bounds.indices(n))
    if part.op == "split":
        size = int(scalars["split_size"])
        begin = size * part.output
        return Block(begin, min(n, begin + size))
    sizes = scalars["split_sizes"]
    begin = sum(sizes[: part.output])
    return Block(begin, min(n, begin + sizes[part.output]))


@dataclass(frozen=True)
class UseAlong:
    """A use of a value, followed along one of its axes.

    Attributes:
        user: result of the operation
        splits: whether it has a part of the axis
        axes: axes of the result that the axis became
        begin: position in the result at which the value begins, behind others concatenated with it
    """

    user: Node
    splits: bool
    axes: frozenset[int]
    begin: int

    @property
    def axis(self) -> int | None:
        """The one axis of the result that the axis became."""
        return agreed(self.axes)


@dataclass(frozen=True)
class _Place:
    """A value with the followed axis."""

    value: Node
    axis: int
    begin: int = 0

    @property
    def size(self) -> int:
        return self.value.shape[self.axis]


def users_along(start: Node, axis: int) -> Iterator[UseAlong]:
    """Yield the uses of a value along one of its axes, the nearest first.

    Operations that keep the axis are followed: views, copies, masks, sums; elementwise ones without
    other activations. A concatenation with other values along the axis is followed to the part of
    it that is this value again:

        q (5, 8) -> cat with k: (5, 16) -> conv -> slice 0:8 is q again, slice 8:16 is skipped
    """
    size = start.shape[axis]
    seen = {start}
    places = [_Place(start, axis)]
    for place in places:
        for use in _uses(place, size, seen):
            yield use
            if use.axis is None or use.user in seen:
                continue
            following = _Place(use.user, use.axis, use.begin)
            keeps_length = following.size in (place.size, size)
            if keeps_length or use.user.op == "cat":
                seen.add(use.user)
                places.append(following)


def _uses(place: _Place, size: int, seen: set[Node]) -> Iterator[UseAlong]:
    """Yield the uses of a value, but for parts that have others of its concatenation."""
    block = Block(place.begin, place.begin + size)
    for user in (use.node for use in place.value.users):
        if not _splits(user, place):
            axes = _axes_after(user, place, seen)
            begin = place.begin + _length_before(user, place)
            yield UseAlong(user, False, axes, begin)
        elif place.size <= size:
            yield UseAlong(user, True, frozenset(), place.begin)
        elif _takes_block(user, place.size, block):
            yield UseAlong(user, False, _axes_after(user, place, seen), begin=0)


def _splits(user: Node, place: _Place) -> bool:
    if user.op == "index":
        same_axes = len(user.shape) == len(place.value.shape)
        return same_axes and user.shape[place.axis] != place.size
    return user.op in ops.SPLITS and _is_along(user, place)


def _is_along(user: Node, place: _Place) -> bool:
    default = -1 if user.op == "glu" else 0
    dim = int(user.scalars.get("dim", default))
    return dim % len(place.value.shape) == place.axis


def _takes_block(part: Node, n: int, block: Block) -> bool:
    if part.op == "glu" or part.op in ops.CHOICES_OF_ROWS:
        return False  # two parts at once, or positions that the graph does not have
    return block_of(part, n) == block


def _length_before(user: Node, place: _Place) -> int:
    """Return the length of what is concatenated before the value, along its axis."""
    if user.op != "cat" or not _is_along(user, place):
        return 0
    position = user.values.index(place.value)
    return sum(part.shape[place.axis] for part in user.values[:position])


def _axes_after(user: Node, place: _Place, seen: set[Node]) -> frozenset[int]:
    axis = frozenset({place.axis})
    if user.op == "cat" or _is_depthwise(user, place):
        return axis
    if user.is_view:
        repeated = {i for i, step in enumerate(user.stride) if step == 0}
        return moved(place.value, user, axis) - repeated  # repeated heads are no channels
    if user.moves or _keeps_values(user, place.value, seen):
        return moved(place.value, user, axis)
    return frozenset()


def _keeps_values(user: Node, value: Node, seen: set[Node]) -> bool:
    if user.op == "masked_fill":
        return True
    is_sum = user.op in ops.SUMS and user.shape == value.shape  # such as LoRA's product
    return user.pointwise and (is_sum or user.reads_only(seen))


def _is_depthwise(user: Node, place: _Place) -> bool:
    """Return True for a convolution of each channel, a sum over positions."""
    if user.op not in ops.CONVOLUTIONS or place.axis != 1:
        return False
    return user.scalars.get("groups") == place.size == user.shape[1]


def head_width(product: Node) -> int | None:
    """Return the width of the heads into which a product's result is viewed; None without."""
    for use in users_along(product, len(product.shape) - 1):
        if len(use.axes) > 1:  # (..., heads, channels)
            return use.user.shape[max(use.axes)]
    return None
