"""Which matrices are concatenated in one weight, from what the pass does with its product.

Queries, keys and values often have one weight. Its product is then split, and the parts meet again
only in attention:

    W x (24) -> split 8 | 8 | 8 -> q, k, v -> attention       cuts at 0, 8, 16, 24
    W x (24) -> view (4, 6) -> split 2 | 2 | 2 in each head   mixed: no blocks of rows
    W x (8)  -> chunk 4 | 4 -> rotated -> cat                 no cut: the halves are joined again

Parts that are joined by a sum or a concatenation belong to one matrix. Parts that multiply each
other are different matrices. If each head, or every other channel, belongs to a different matrix,
no block of rows is one of them: mixed.
"""

from collections.abc import Collection, Iterable
from itertools import pairwise

from lightning_sv.roles.along import Block, UseAlong, block_of, users_along
from lightning_sv.roles.graph import DATA, PARAM, Node, Use, users_in_order
from lightning_sv.roles.ops import (
    ATTENTION,
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
_SLICES = _BLOCKS | _SINGLES
_MEETING = SUMS | _JOINS
_KEEPING_PARTS = _JOINS | ATTENTION | SOFTMAX


def parts_of(use: Use, d_out: int) -> tuple[int, ...] | None:
    """Return the widths of the matrices in a weight of `d_out` rows, from its use in a product.

    None if there are several that are not blocks of rows.
    """
    product = use.node
    axis = _rows_axis(use)
    n = product.shape[axis]
    if n < d_out:
        return None
    if n > d_out:  # stacked matrices, each with its own vectors
        return (d_out,)
    try:
        cuts = _cuts(product, axis, _BLOCKS)
    except _NoBlocksError:
        return None
    return tuple(high - low for low, high in pairwise(sorted(cuts)))


def _rows_axis(use: Use) -> int:
    """Return the axis of a product that is the matrix's axis of rows."""
    n_axes = len(use.node.shape)
    _, last = PRODUCTS[use.node.op]
    if use.argument == last:
        return n_axes - 1
    return n_axes - 2


class _NoBlocksError(Exception):
    """The parts of a product are no blocks of channels."""


def _cuts(value: Node, axis: int, takes_part: frozenset[str]) -> set[int]:
    """Return where an axis of channels, or of heads, is split by one of some operations.

    There is no cut between parts that are joined again, nor if the pass reads one part only.

    Raises:
        _NoBlocksError: the parts are no blocks
    """
    n = value.shape[axis]
    cuts = {0, n}
    parts: list[Node] = []
    for use in users_along(value, axis):
        if not use.splits:
            cuts |= _cuts_of_heads(use, n)
        elif use.user.op in takes_part:
            parts.append(use.user)
        else:
            cuts |= _cuts_of_choice(use.user, axis, n)

    return cuts | _cuts_between(_joined_blocks(parts, n))


def _cuts_of_choice(user: Node, axis: int, n: int) -> set[int]:
    """Return the cuts of a split that does not return one block."""
    if user.op == "glu":
        return {n // 2}
    if user.op in _SINGLES:  # one head
        return set()
    if user.shape[axis] >= n:  # a permutation
        return set()
    raise _NoBlocksError  # the graph does not have the positions of a choice


def _cuts_of_heads(use: UseAlong, n: int) -> set[int]:
    """Return where a view (..., heads, channels) splits its axis of heads, in channels."""
    view = use.user
    if len(use.axes) < 2 or not view.is_view:
        return set()
    first, *inner = sorted(use.axes)
    n_heads = view.shape[first]
    takes_part = _BLOCKS
    if n_heads in (2, 3):  # the axis may be that of two or three matrices, of which one is selected
        takes_part = _BLOCKS | _SINGLES

    heads = _cuts(view, first, takes_part)
    for axis in inner:
        cuts_of_each_head = _cuts(view, axis, _SLICES) - {0, view.shape[axis]}
        if cuts_of_each_head:
            raise _NoBlocksError  # each head has a part of every matrix
    return {head * n // n_heads for head in heads}


def _joined_blocks(parts: Iterable[Node], n: int) -> dict[Block, set[Block]]:
    """Return block of an axis of size n -> the group of blocks that are joined again with it.

    Blocks are followed through views, elementwise operations and attention, until they meet in a
    product. Empty parts are none, such as the channels that a complete rotation leaves.
    """
    blocks_in: dict[Node, frozenset[Block]] = {}
    group_of: dict[Block, set[Block]] = {}
    for part in parts:
        if part.size:
            block = block_of(part, n)
            blocks_in[part] = frozenset({block})
            group_of[block] = {block}

    for user in users_in_order(blocks_in):
        read = {blocks_in[value] for value in user.values if value in blocks_in}
        follows = _keeps_part(user, blocks_in)
        if len(read) > 1:
            follows = user.op in _MEETING
        if follows:
            blocks_in[user] = frozenset[Block]().union(*read)
            _join(blocks_in[user], group_of)
    return group_of


def _join(blocks: Iterable[Block], group_of: dict[Block, set[Block]]) -> None:
    """Make one group of those that some blocks are in."""
    group: set[Block] = set()
    for block in blocks:
        group |= group_of[block]
    group_of |= dict.fromkeys(group, group)


def _cuts_between(group_of: dict[Block, set[Block]]) -> set[int]:
    """Return where a block begins next to another that is in a different group.

    Raises:
        _NoBlocksError: several groups have every other channel, or so
    """
    cuts = set()
    for before, after in pairwise(sorted(group_of)):
        if after not in group_of[before]:
            cuts.add(after.begin)

    has_steps = any(block.step > 1 for block in group_of)
    if cuts and has_steps:
        raise _NoBlocksError
    return cuts


def _keeps_part(user: Node, parts: Collection[Node]) -> bool:
    """Return True if an operation returns a part alone, without a further matrix or data."""
    if user.moves or user.op in _KEEPING_PARTS:
        return True
    kinds_of_others = user.kinds_outside(parts)
    if user.op in PRODUCTS:
        return PARAM not in kinds_of_others
    if user.pointwise:
        return DATA not in kinds_of_others
    return False
