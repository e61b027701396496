"""Which matrices are concatenated in one weight, from what the pass does with its product.

Queries, keys and values often have one weight. Its product is then split, and the parts meet again
only in attention:

    W x (24) -> split 8 | 8 | 8 -> q, k, v -> attention       cuts at 0, 8, 16, 24
    W x (24) -> view (4, 6) -> split 2 | 2 | 2 in each head   mixed: no blocks of rows
    W x (8)  -> chunk 4 | 4 -> rotated -> cat                 no cut: the halves are joined again

Parts that are joined by a sum or a concatenation belong to one matrix. Parts that multiply each
other are different matrices. If they are split behind an operation that mixes or moves channels,
such as a softmax, no block of rows is one of them: mixed.
"""

from collections.abc import Collection, Iterable
from itertools import pairwise

from lightning_sv.roles.along import Block, UseAlong, block_of, users_along
from lightning_sv.roles.graph import DATA, PARAM, Node, Use, users_in_order
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
_PRODUCTS = ATTENTION | (PRODUCTS.keys() - set(CONVOLUTIONS))
_MEETING = SUMS | _JOINS
_KEEPING_PARTS = _JOINS | ATTENTION | SOFTMAX


#: blocks that are joined again
_Group = frozenset[Block]


def parts_of(use: Use, d_out: int) -> tuple[int, ...] | None:
    """Return the widths of the matrices in a weight of `d_out` rows, from its use in a product.

    None if there are several that are not blocks of rows.
    """
    product = use.node
    _, last = PRODUCTS[product.op]
    is_last = use.argument == last
    axis = len(product.shape) - (1 if is_last else 2)
    n = product.shape[axis]
    if n < d_out:
        return None
    if n > d_out:  # stacked matrices, each with its own vectors
        return (d_out,)
    try:
        cuts = _cuts(product, axis)
    except _NoBlocksError:
        return None
    parts = tuple(high - low for low, high in pairwise(sorted(cuts)))
    has_unseen_parts = len(parts) == 1 and _meets_itself(product)
    return None if has_unseen_parts else parts


class _NoBlocksError(Exception):
    """The parts of a product are no blocks of channels."""


def _cuts(value: Node, axis: int, *, stacked: bool = False) -> set[int]:
    """Return where an axis of channels, or of heads, is split.

    There is no cut between parts that are joined again, nor if the pass reads one part only. With
    `stacked` the axis may be that of two or three matrices, of which one is selected.

    Raises:
        _NoBlocksError: the parts are no blocks
    """
    n = value.shape[axis]
    takes_part = _BLOCKS
    if stacked and n in (2, 3):
        takes_part = _BLOCKS | _SINGLES

    cuts = {0, n}
    parts: list[Node] = []
    for use in users_along(value, axis):
        if not use.splits:
            cuts |= _cuts_of_heads(use, n)
        elif use.user.op in takes_part:
            parts.append(use.user)
        else:
            cuts |= _cuts_of_choice(use.user, axis, n)
    return cuts | _cuts_between(_groups(parts, n))


def _cuts_of_choice(user: Node, axis: int, n: int) -> set[int]:
    """Return the cuts of a split that does not return one block."""
    if user.op == "glu":
        return {n // 2}
    keeps_all = user.op in _SINGLES or user.shape[axis] >= n  # one head, or a permutation
    if keeps_all:
        return set()
    raise _NoBlocksError  # the graph does not have the positions of a choice


def _cuts_of_heads(use: UseAlong, n: int) -> set[int]:
    """Return where a view (..., heads, channels) splits its axis of heads, in channels."""
    view = use.user
    if len(use.axes) < 2 or not view.is_view:
        return set()
    first, *inner = sorted(use.axes)
    heads = _cuts(view, first, stacked=True)
    if any(_takes_apart(view, axis) for axis in inner):
        raise _NoBlocksError  # each head has a part of every matrix
    return {at * n // view.shape[first] for at in heads}


def _takes_apart(view: Node, axis: int) -> bool:
    """Return True if the pass splits an axis and does not join its parts again."""
    parts = []
    for use in users_along(view, axis):
        if use.splits and use.user.op not in CHOICES_OF_ROWS:
            parts.append(use.user)
    return len(_groups(parts, view.shape[axis])) > 1


def _groups(parts: Iterable[Node], n: int) -> list[_Group]:
    """Return the blocks of an axis of size n, in groups that are joined again.

    Blocks are followed through views, elementwise operations and attention, until they meet in a
    product. Empty parts are none, such as the channels that a complete rotation leaves.
    """
    blocks_in = {part: frozenset({block_of(part, n)}) for part in parts if part.size}
    groups = list(blocks_in.values())
    for user in users_in_order(blocks_in):
        read = {blocks_in[value] for value in user.values if value in blocks_in}
        meets = len(read) > 1
        follows = user.op in _MEETING if meets else _keeps_part(user, blocks_in)
        if follows:
            blocks_in[user] = _Group().union(*read)
            groups.append(blocks_in[user])
    return _merged(groups)


def _merged(groups: Iterable[_Group]) -> list[_Group]:
    """Return the unions of groups that have a block in common."""
    merged: list[_Group] = []
    for group in groups:
        overlapping = [other for other in merged if other & group]
        merged = [other for other in merged if not other & group]
        merged.append(group.union(*overlapping))
    return merged


def _cuts_between(groups: list[_Group]) -> set[int]:
    """Return where a block begins next to another that is in a different group.

    Raises:
        _NoBlocksError: several groups have every other channel, or so
    """
    group_of: dict[Block, _Group] = {}
    for group in groups:
        group_of |= dict.fromkeys(group, group)
    has_steps = any(block.step > 1 for block in group_of)
    if has_steps and len(groups) > 1:
        raise _NoBlocksError

    cuts = set()
    for block, group in group_of.items():
        before = _nearest_before(block, group_of)
        if before and group.isdisjoint(before):
            cuts.add(block.begin)
    return cuts


def _nearest_before(block: Block, blocks: Iterable[Block]) -> list[Block]:
    """Return the blocks that end last before this one begins."""
    earlier = [other for other in blocks if other.end <= block.begin]
    last_end = max((other.end for other in earlier), default=0)
    return [other for other in earlier if other.end == last_end]


def _keeps_part(user: Node, parts: Collection[Node]) -> bool:
    """Return True if an operation returns a part alone, without a further matrix or data."""
    if user.moves or user.op in _KEEPING_PARTS:
        return True
    kinds_of_others = user.kinds_outside(parts)
    if user.op in PRODUCTS:
        return PARAM not in kinds_of_others
    return user.pointwise and DATA not in kinds_of_others


def _meets_itself(product: Node) -> bool:
    """Return True if parts of a product are two arguments of attention, or of a later product.

    One matrix may be read twice, as shared queries and keys, but not in parts. Unfused attention
    multiplies queries by keys, then the weights by values.
    """
    values = {product}
    parts: set[Node] = set()
    for user in users_in_order(values):
        if not _stays_one(user, values):
            continue
        read = values.intersection(user.values)
        reads_part = not parts.isdisjoint(read)
        if reads_part and len(read) > 1 and user.op in _PRODUCTS:
            return True
        if reads_part or _takes_part(user, read):
            parts.add(user)
        values.add(user)
    return False


def _takes_part(user: Node, values: Collection[Node]) -> bool:
    """Return True for a view or a choice of rows that is smaller than a value that it reads."""
    selects = user.moves or user.op in CHOICES_OF_ROWS
    return selects and any(user.size < value.size for value in values)


def _stays_one(user: Node, values: set[Node]) -> bool:
    """Return True unless a value meets a matrix, or other activations as their factor.

    A factor, such as a gate, counts as one matrix; so do channels joined with others.
    """
    kinds_of_others = user.kinds_outside(values)
    if user.op in _PRODUCTS:
        return PARAM not in kinds_of_others
    meets_data = DATA in kinds_of_others
    return not meets_data or not (user.op == "mul" or _joins_channels(user))


def _joins_channels(user: Node) -> bool:
    """Return True for a concatenation along the last axis."""
    axis = int(user.scalars.get("dim", 0))
    return user.op == "cat" and axis in (-1, len(user.shape) - 1)
