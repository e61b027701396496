"""Uses of a value along one of its axes, such as the heads of a product.

The axis is followed through views, masks and sums, and a part of a concatenation by its positions:

    q (5, 32) -> view (5, 4, 8)             axis 1 becomes heads and channels
              -> cat with k -> slice 0:32   q again, along axis 1
              -> slice 0:16                 a part of the axis: a split
"""

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import lightning_sv.roles.ops as ops
from lightning_sv.roles.axes import moved
from lightning_sv.roles.graph import Node
from lightning_sv.roles.types import agreed


class Block(NamedTuple):
    """Positions of a part along an axis."""

    begin: int
    end: int
    step: int = 1


def block_of(part: Node, n: int) -> Block:
    """Return the positions of a part of an axis of size n."""
    scalars = part.scalars
    if part.op == "select":
        begin = int(scalars["index"]) % n
        return Block(begin, begin + 1)
    if part.op == "slice":
        bounds = slice(scalars.get("start"), scalars.get("end"), scalars.get("step"))
        return Block(*bounds.indices(n))

    if part.op == "unbind":
        return Block(part.output, part.output + 1)

    sizes = scalars.get("split_sizes")  # of split_with_sizes
    if sizes is None:
        sizes = [scalars["split_size"]] * n
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

    def is_dim_of(self, user: Node) -> bool:
        """Return True if an operation works along the axis."""
        default = 0
        if user.op == "glu":
            default = -1
        dim = int(user.scalars.get("dim", default))
        return dim % len(self.value.shape) == self.axis

    def is_split_by(self, user: Node) -> bool:
        """Return True if an operation has a part of the axis."""
        if user.op == "index":
            same_axes = len(user.shape) == len(self.value.shape)
            return same_axes and user.shape[self.axis] != self.size
        return user.op in ops.SPLITS and self.is_dim_of(user)

    def length_before(self, user: Node) -> int:
        """Return the length of what an operation concatenates before the value."""
        if user.op != "cat" or not self.is_dim_of(user):
            return 0
        position = user.values.index(self.value)
        return sum(part.shape[self.axis] for part in user.values[:position])

    def axes_in(self, user: Node, followed: Collection[Node]) -> frozenset[int]:
        """Return the axes of a result that the axis becomes; empty if its values change."""
        axis = frozenset({self.axis})
        if user.op == "cat" or self._is_channels_of(user):
            return axis
        if not _keeps_values(user, self.value, followed):
            return frozenset()
        axes = moved(self.value, user, axis)
        return frozenset(i for i in axes if user.stride[i] != 0)  # repeated heads are no channels

    def _is_channels_of(self, user: Node) -> bool:
        """Return True for a convolution of each channel, a sum over positions."""
        if user.op not in ops.CONVOLUTIONS or self.axis != 1:
            return False
        return user.scalars.get("groups") == self.size == user.shape[1]


def users_along(start: Node, axis: int) -> Iterator[UseAlong]:
    """Yield the uses of a value along one of its axes, the nearest first.

    Operations that keep the axis are followed: views, copies, masks, sums; elementwise ones without
    other activations. A concatenation with other values along the axis is followed to the part of
    it that is this value again:

        q (5, 8) -> cat with k: (5, 16) -> conv -> slice 0:8 is q again, slice 8:16 is skipped
    """
    length = start.shape[axis]
    followed = {start}
    waiting = deque([_Place(start, axis)])
    while waiting:
        place = waiting.popleft()
        for read in place.value.users:
            use = _use_by(read.node, place, length, followed)
            if use is None:
                continue
            yield use
            following = _place_after(use, place, length)
            if following is not None and following.value not in followed:
                followed.add(following.value)
                waiting.append(following)


def _place_after(use: UseAlong, place: _Place, length: int) -> _Place | None:
    """Return the result of a use with the followed axis; None if this ends there."""
    if use.axis is None:
        return None
    following = _Place(use.user, use.axis, use.begin)
    if use.user.op == "cat" or following.size in (place.size, length):
        return following
    return None


def _use_by(user: Node, place: _Place, length: int, followed: Collection[Node]) -> UseAlong | None:
    """Return the use of a value by an operation; None for other parts of its concatenation.

    The followed value has `length` positions of the axis, fewer than the place if it is
    concatenated with others.
    """
    if not place.is_split_by(user):
        begin = place.begin + place.length_before(user)
        return UseAlong(user, False, place.axes_in(user, followed), begin)
    if place.size == length:
        return UseAlong(user, True, frozenset(), place.begin)
    own_block = Block(place.begin, place.begin + length)
    if _takes_block(user, place.size, own_block):  # the value alone again
        return UseAlong(user, False, place.axes_in(user, followed), begin=0)
    return None


def _takes_block(part: Node, n: int, block: Block) -> bool:
    """Return True if an operation has exactly these positions of an axis of size n."""
    if part.op == "glu" or part.op in ops.CHOICES_OF_ROWS:
        return False  # two parts at once, or positions that the graph does not have
    return block_of(part, n) == block


def _keeps_values(user: Node, value: Node, followed: Collection[Node]) -> bool:
    """Return True for views, copies, masks and sums, and elementwise operations without data."""
    if user.moves or user.op == "masked_fill":
        return True
    if not user.pointwise:
        return False
    is_sum = user.op in ops.SUMS and user.shape == value.shape  # such as LoRA's product
    return is_sum or user.reads_only(followed)


def head_width(product: Node) -> int | None:
    """Return the width of the heads into which a product's result is viewed; None without."""
    for use in users_along(product, len(product.shape) - 1):
        if len(use.axes) > 1:  # (..., heads, channels)
            return use.user.shape[max(use.axes)]
    return None
