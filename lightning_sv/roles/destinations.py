"""Where the products of a matrix end: in a choice of experts, or in the output."""

import lightning_sv.roles.ops as ops
from lightning_sv.roles.graph import Node, Walk, users_in_order

_ARITHMETIC = frozenset({"mul", "div", "add", "sub"})
_OF_LOGITS_ALONE = ops.SCORES | ops.POWERS | ops.STATISTICS
_KEEPING_LOGITS = ops.LOSSES | ops.NORMS.keys() | ops.ROWS.keys() | {"where", "masked_fill"}


def is_router(product: Node) -> bool:
    """Return True if a product reaches a selection (top-k, sort, argmax) as scores."""
    walk = Walk(product)
    for _, argument, user in walk:
        if user.op in ops.CHOICES and argument == "self":
            return True
        if user.moves or _keeps_scores(user, walk.seen):
            walk.follow(user)
    return False


def _keeps_scores(user: Node, scores: set[Node]) -> bool:
    if user.op in _ARITHMETIC:
        return user.reads_only(scores)
    return user.op in ops.SCORES


def is_head(product: Node, outputs: set[Node]) -> bool:
    """Return True if a product reaches only the output, but for a scale, cap, norm or loss."""
    logits = {product}
    for user in users_in_order(logits):
        if not _keeps_logits(user, logits):
            return False
        logits.add(user)
    return not outputs.isdisjoint(logits)


def _keeps_logits(user: Node, logits: set[Node]) -> bool:
    """Return True if an operation returns logits again, or a number computed from them."""
    if user.moves or user.op in _KEEPING_LOGITS:
        return True
    return user.op in _OF_LOGITS_ALONE and user.reads_only(logits)
