"""Axes of a value in what is computed of it, from shapes and strides."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import lightning_sv.roles.ops as ops
from lightning_sv.roles.graph import Node


def contraction(product: Node, name: str, operand: Node) -> int:
    """Return the axis of `operand`, argument `name` of `product`, that the product sums over."""
    _, matrix = ops.PRODUCTS[product.op]
    axes = len(operand.shape)
    if product.op in ops.CONVOLUTIONS:
        return 1
    if axes == 1 or name != matrix or product.op in ops.TRANSPOSED:
        return axes - 1
    return axes - 2


def moved(source: Node, result: Node, axes: frozenset[int]) -> frozenset[int]:
    """Return the axes of `result`, a view or an elementwise result, that have `axes` of `source`.

    An axis of a view has the axes of the source whose strides it covers, possibly several:

        source (2, 12), strides (12, 1)  ->  view (2, 3, 4), strides (12, 4, 1): axis 1 -> 1 and 2
    """
    if not result.is_view:
        shift = len(result.shape) - len(source.shape)
        return frozenset(axis + shift for axis in axes if axis + shift >= 0)
    of_view = range(len(result.shape))
    return frozenset(axis for axis in of_view if _corresponds(source, axes, result, axis))


def _corresponds(source: Node, axes: frozenset[int], view: Node, axis: int) -> bool:
    size = view.shape[axis]
    step = view.stride[axis]
    if size == 1:
        return False
    if step == 0:  # broadcast axes correspond to all
        return True
    return any(_overlaps(source, each, step, step * size) for each in axes)


def _overlaps(source: Node, axis: int, step: int, end: int) -> bool:
    n = source.shape[axis]
    low = source.stride[axis]
    return n > 1 and 0 < low < end and low * n > step


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
        return min(self.axes) if len(self.axes) == 1 else None


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
        for _, user in place.value.users:
            use = _use(place, user, size, seen)
            if use is None:
                continue
            yield use
            if use.axis is None or user in seen:
                continue
            if user.op == "cat" or user.shape[use.axis] in (place.size, size):
                seen.add(user)
                places.append(_Place(user, use.axis, use.begin))


def _use(place: _Place, user: Node, size: int, seen: set[Node]) -> UseAlong | None:
    """Return the use of a value; None for a part that has others of its concatenation."""
    splits = _splits(user, place)
    if splits and place.size > size:
        begin = place.begin
        if not _takes_block(user, place.size, Block(begin, begin + size)):
            return None
        return UseAlong(user, False, _axes_after(user, place, seen), begin=0)

    axes = frozenset[int]() if splits else _axes_after(user, place, seen)
    return UseAlong(user, splits, axes, place.begin + _length_before(user, place))


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
    parts = user.values
    before = parts[: parts.index(place.value)]
    return sum(part.shape[place.axis] for part in before)


def _axes_after(user: Node, place: _Place, seen: set[Node]) -> frozenset[int]:
    if user.op == "cat" or _is_depthwise(user, place):
        return frozenset({place.axis})
    if not user.moves and not _keeps_values(user, place.value, seen):
        return frozenset()
    axes = moved(place.value, user, frozenset({place.axis}))
    if not user.is_view:
        return axes
    return frozenset(axis for axis in axes if user.stride[axis])  # no repeated heads


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
