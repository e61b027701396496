"""Where the products of a matrix end: in a choice of experts, or in the output.

A walk follows a product in the order of the pass, as long as its values are still scores, or
logits:

    W x -> softmax -> mul -> topk      a router: the scores are ranked
    W x -> div -> tanh -> mul          a head: nothing but the output reads it
"""

import lightning_sv.roles.ops as ops
from lightning_sv.roles.graph import Node, users_in_order

_ARITHMETIC = frozenset({"mul", "div", "add", "sub"})
_OF_LOGITS_ALONE = ops.SCORES | ops.POWERS | ops.STATISTICS
_KEEPING_LOGITS = ops.LOSSES | ops.NORMS.keys() | ops.ROWS.keys() | {"where", "masked_fill"}


def is_router(product: Node) -> bool:
    """Return True if a product reaches a selection (top-k, sort, argmax) as scores."""
    scores = {product}
    for user in users_in_order(scores):
        if user.op in ops.CHOICES and user.argument("self") in scores:
            return True
        if user.moves or _keeps_scores(user, scores):
            scores.add(user)
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
