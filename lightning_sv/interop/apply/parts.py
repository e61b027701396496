"""Which matrices are concatenated in one weight, from what the pass does with its product.

Queries, keys and values often have one weight. Its product is then split, and the parts meet again
only in attention:

    W x (24) -> split 8 | 8 | 8 -> q, k, v -> attention       cuts at 0, 8, 16, 24
    W x (24) -> view (4, 6) -> split 2 | 2 | 2 in each head   mixed: no blocks of rows
    W x (8)  -> chunk 4 | 4 -> rotated -> cat                 no cut: the halves are joined again

Parts that are joined by a sum or a concatenation belong to one matrix. Parts that multiply each
other are different matrices.
"""

import math
from itertools import pairwise
from typing import NamedTuple

from lightning_sv.roles.axes import Block, UseAlong, block_of, users_along
from lightning_sv.roles.graph import DATA, PARAM, Node, Walk, users_in_order
from lightning_sv.roles.ops import (
    ATTENTION,
    CHOICES_OF_ROWS,
    CONVOLUTIONS,
    PRODUCTS,
    SOFTMAX,
    SUMS,
)

#: operations that put parts together
_JOINS = frozenset({"cat", "stack", "copy"})
#: operations that take single indices of an axis
_SINGLES = frozenset({"unbind", "select"})
#: operations that take blocks of an axis
_BLOCKS = frozenset({"split", "split_with_sizes", "slice"})
_MULTIPLYING = PRODUCTS.keys() - set(CONVOLUTIONS)
_KEEPING_PARTS = _JOINS | ATTENTION | SOFTMAX


class Layout(NamedTuple):
    """Matrices in one weight.

    Attributes:
        parts: their widths
        mixed: whether there are several that are not blocks of rows
    """

    parts: tuple[int, ...]
    mixed: bool


def layout_of(product: Node, argument: str, d_out: int) -> Layout:
    """Return the matrices in a weight of `d_out` rows, an `argument` of a product."""
    is_last = argument == PRODUCTS[product.op][1]
    axis = len(product.shape) - (1 if is_last else 2)
    n = product.shape[axis]
    if n != d_out:  # a longer axis has stacked matrices, each with its own vectors
        return Layout((d_out,), mixed=n < d_out)
    cuts = _cuts(product, axis)
    if cuts is None:
        return Layout((d_out,), mixed=True)
    parts = tuple(high - low for low, high in pairwise(sorted(cuts)))
    return Layout(parts, mixed=len(parts) == 1 and _meets_itself(product))


def _cuts(value: Node, axis: int, *, stacked: bool = False) -> set[int] | None:
    """Return where an axis of channels, or of heads, is split; None if the parts are no blocks.

    There is no cut between parts that are joined again, nor if the pass reads one part only. With
    `stacked` the axis may be that of two or three matrices, of which one is selected.
    """
    n = value.shape[axis]
    selects_matrix = stacked and n in (2, 3)
    taking = _BLOCKS | _SINGLES if selects_matrix else _BLOCKS
    cuts = {0, n}
    parts: list[Node] = []
    for use in users_along(value, axis):
        if use.splits and use.user.op in taking:
            parts.append(use.user)
            continue
        more = _cuts_without_parts(use, axis, n)
        if more is None:
            return None
        cuts |= more

    groups = _Groups(parts, n)
    return None if groups.are_interleaved else cuts | groups.cuts()


def _cuts_without_parts(use: UseAlong, axis: int, n: int) -> set[int] | None:
    """Return the cuts of a use that does not return one block; None if the parts are no blocks."""
    if not use.splits:
        return _cuts_of_heads(use, n)
    if use.user.op == "glu":
        return {n // 2}
    if use.user.op in _SINGLES:
        return set()
    is_permuted = use.user.shape[axis] >= n
    return set() if is_permuted else None  # the graph does not have the positions of a choice


def _cuts_of_heads(use: UseAlong, n: int) -> set[int] | None:
    """Return where a view splits its axis of heads, in channels; None if it splits each head."""
    view = use.user
    if len(use.axes) < 2 or not view.is_view:
        return set()
    first, *inner = sorted(use.axes)
    heads = _cuts(view, first, stacked=True)
    if heads is None or any(_takes_apart(view, axis) for axis in inner):
        return None
    return {at * n // view.shape[first] for at in heads}


def _takes_apart(view: Node, axis: int) -> bool:
    """Return True if the pass splits an axis and does not join its parts again."""
    splitting = [use.user for use in users_along(view, axis) if use.splits]
    parts = [part for part in splitting if part.op not in CHOICES_OF_ROWS]
    return _Groups(parts, view.shape[axis]).are_several


class _Groups:
    """Parts of an axis of size n, with those that are joined again in one group.

    Parts of the same block are in one group, too. Parts are followed through views, elementwise
    operations and attention, until they meet in a product.
    """

    def __init__(self, parts: list[Node], n: int) -> None:
        self._blocks = [block_of(part, n) for part in parts]
        alike: dict[Block, set[int]] = {}
        for i, block in enumerate(self._blocks):
            alike.setdefault(block, set()).add(i)
        self._groups = [frozenset(alike[block]) for block in self._blocks]
        self._follow(parts)

    def _follow(self, parts: list[Node]) -> None:
        indices = dict(zip(parts, self._groups, strict=True))  # value -> the parts in it
        for user in users_in_order(indices):
            read = {indices[value] for value in user.values if value in indices}
            all_read = frozenset[int]().union(*read)
            if len(read) == 1:
                follows = _keeps_part(user, indices)
            else:
                follows = user.op in SUMS | _JOINS
                if follows:
                    self._join(all_read)
            if follows:
                indices[user] = all_read

    def _join(self, indices: frozenset[int]) -> None:
        joined = frozenset[int]().union(*(self._groups[i] for i in indices))
        for i in joined:
            self._groups[i] = joined

    @property
    def are_several(self) -> bool:
        """True if not all parts are joined again."""
        return len(set(self._groups)) > 1

    @property
    def are_interleaved(self) -> bool:
        """True for several groups of parts with steps."""
        return self.are_several and any(block.step > 1 for block in self._blocks)

    def cuts(self) -> set[int]:
        """Return where a part begins next to another that is in a different group."""
        pairs = zip(self._blocks, self._groups, strict=True)
        return {block.begin for block, group in pairs if self._is_cut(block, group)}

    def _is_cut(self, block: Block, group: frozenset[int]) -> bool:
        ends = [other.end for other in self._blocks if other.end <= block.begin]
        if not ends:
            return False
        pairs = zip(self._blocks, self._groups, strict=True)
        return group not in [of for other, of in pairs if other.end == max(ends)]


def _keeps_part(user: Node, parts: dict[Node, frozenset[int]]) -> bool:
    """Return True if an operation returns a part alone, without a further matrix or data."""
    if user.moves or user.op in _KEEPING_PARTS:
        return True
    kinds_of_others = {value.kind for value in user.values if value not in parts}
    if user.op in PRODUCTS:
        return PARAM not in kinds_of_others
    return user.pointwise and DATA not in kinds_of_others


def _meets_itself(product: Node) -> bool:
    """Return True if parts of a product are two arguments of attention, or of a later product.

    One matrix may be read twice, as shared queries and keys, but not in parts. Unfused attention
    multiplies queries by keys, then the weights by values.
    """
    walk = Walk(product)
    parts: set[Node] = set()
    for value, _, user in walk:
        if value in parts or _takes_part(user, value):
            parts.add(user)
        if not _stays_one(user, value, walk.seen):
            continue
        meeting = walk.seen.intersection(user.values)
        if _is_product(user) and len(meeting) > 1 and not parts.isdisjoint(meeting):
            return True
        walk.follow(user)
    return False


def _takes_part(user: Node, value: Node) -> bool:
    selects = user.moves or user.op in CHOICES_OF_ROWS
    return selects and math.prod(user.shape) < math.prod(value.shape)


def _is_product(user: Node) -> bool:
    return user.op in ATTENTION or (user.op in _MULTIPLYING)


def _stays_one(user: Node, value: Node, seen: set[Node]) -> bool:
    """Return True unless a value meets a matrix, or other activations as their factor.

    A factor, such as a gate, counts as one matrix; so do channels joined with others.
    """
    kinds_of_others = {other.kind for other in user.others(value) if other not in seen}
    if _is_product(user):
        return PARAM not in kinds_of_others
    last = len(user.shape) - 1
    joins = user.op == "cat" and int(user.scalars.get("dim", 0)) in (-1, last)
    return DATA not in kinds_of_others or not (joins or user.op == "mul")
