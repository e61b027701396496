"""Heads into which the result of a matrix is taken apart.

A norm after queries or keys normalizes each head, so its width must be known. The pass shows it in
one of two ways:

    W x (24) -> view (4, 6)                    heads of width 6
    W x (24) -> split 6 | 6 | 6 | 6 -> stack   heads of width 6
    W x (24) -> view (6, 4), 4 computed apart  the heads are the last axis: width 0
"""

import lightning_sv.roles.ops as ops
from lightning_sv.roles.axes import UseAlong, moved, users_along
from lightning_sv.roles.graph import Node, users_in_order

_BLOCKS = frozenset({"split", "split_with_sizes", "slice"})


def head_width(product: Node) -> int | None:
    """Return the width of the heads into which a product's result is taken apart; None without.

    It is 0 if a view has the heads along its last axis, so that the channels of a head are not
    adjacent.
    """
    parts: list[Node] = []
    for use in users_along(product, len(product.shape) - 1):
        if use.splits and _is_block(use.user):
            parts.append(use.user)
        if len(use.axes) > 1:
            return _width_in_view(use)
    width = _width_of_parts(parts)
    return width if width and product.shape[-1] % width == 0 else None


def _is_block(part: Node) -> bool:
    return part.op in _BLOCKS and part.scalars.get("step") in (None, 1)


def _width_in_view(use: UseAlong) -> int:
    """Return the width of the heads in a view (..., heads, channels), also of halves of heads."""
    view = use.user
    _, *inside = sorted(use.axes, key=lambda axis: -view.stride[axis])  # the first counts heads
    last = inside.pop()
    if _counts_heads(view, last):
        return 0
    width = view.shape[last]
    if not inside:
        return width
    has_pairs = width == 2 or _is_halved(
        view, inside[-1]
    )  # (..., heads, n, 2) or (..., heads, 2, n)
    return width * view.shape[inside[-1]] if has_pairs else width


def _is_halved(view: Node, axis: int) -> bool:
    """Return True for the halves of a head, as in rotary embeddings; not for queries of one key."""
    return view.shape[axis] == 2 and any(use.splits for use in users_along(view, axis))


def _counts_heads(view: Node, axis: int) -> bool:
    """Return True if attention computes each index of an axis of a view separately, as a head.

    Unlike in `users_along`, the axis may be merged with the batch.
    """
    seen = {view}
    places = [(view, axis)]
    for value, at in places:
        for _, user in value.users:
            batch_axes = _batch_axes(user, value)
            if batch_axes is not None:
                return at < batch_axes
            after = _axes_after(value, user, at)
            if len(after) == 1 and user not in seen:
                seen.add(user)
                places.append((user, min(after)))
    return False


def _batch_axes(user: Node, value: Node) -> int | None:
    """Return the number of axes that attention or a batched product computes separately."""
    if user.op in ops.ATTENTION:
        return len(value.shape) - 1
    return len(value.shape) - 2 if user.op in ops.BATCHED else None


def _axes_after(value: Node, user: Node, axis: int) -> frozenset[int]:
    if user.op == "cat":
        return frozenset({axis})
    if user.moves or user.pointwise:
        return moved(value, user, frozenset({axis}))
    return frozenset()


def _width_of_parts(parts: list[Node]) -> int | None:
    """Return the width of equal parts that the pass joins along a new axis or the batch."""
    if len({part.shape for part in parts}) != 1:
        return None
    meeting = _meeting(parts)
    axis = _dim(parts[0])
    makes_heads = meeting is not None and _makes_heads(meeting, axis)
    return parts[0].shape[axis] if makes_heads else None


def _meeting(parts: list[Node]) -> Node | None:
    """Return the first operation that reads several parts, also after pointwise operations."""
    owners = {part: i for i, part in enumerate(parts)}
    for user in users_in_order(owners):
        read = {owners[value] for value in user.values if value in owners}
        if len(read) > 1:
            return user
        if user.moves or user.pointwise:
            owners[user] = read.pop()
    return None


def _makes_heads(user: Node, axis: int) -> bool:
    """Return True if an operation joins parts of an axis along another one."""
    return user.op == "stack" or (user.op == "cat" and _dim(user) != axis)


def _dim(node: Node) -> int:
    return int(node.scalars.get("dim", 0)) % len(node.shape)
