"""Where the products of a matrix end: in a choice of experts, or in the output.

A walk follows a product in the order of the pass, as long as its values are still scores, or
logits:

    W x -> softmax -> mul -> topk      a router: the scores are ranked
    W x -> div -> tanh -> mul          a head: nothing but the output reads it
"""

from collections.abc import Collection

import lightning_sv.roles.ops as ops
from lightning_sv.roles.graph import Node, follow

_ARITHMETIC = frozenset({"mul", "div", "add", "sub"})
_OF_LOGITS_ALONE = ops.SCORES | ops.POWERS | ops.STATISTICS | ops.CHOICES | {"amax", "logsumexp"}
_KEEPING_LOGITS = ops.LOSSES | ops.NORMS.keys() | ops.ROWS.keys() | {"where", "masked_fill"}


def is_router(product: Node) -> bool:
    """Return True if a product reaches a selection (top-k, sort, argmax) as scores."""
    scores = follow(product, _keeps_scores)
    choices = filter(_is_choice, scores.ends)
    ranked = {choice.argument("self") for choice in choices}
    return not scores.values.isdisjoint(ranked)


def _is_choice(end: Node) -> bool:
    """Return True for a selection that the model uses; maxima without positions are a pooling."""
    if end.op == "max" and end.output == 0:
        return False
    return end.op in ops.CHOICES and bool(end.users)


def _keeps_scores(user: Node, scores: Collection[Node]) -> bool:
    """Return True if an operation returns scores again."""
    if user.op in _ARITHMETIC:
        return user.reads_only(scores)
    return user.moves or user.op in ops.SCORES


def is_head(product: Node, outputs: set[Node]) -> bool:
    """Return True if a product reaches only the output, but for a scale, cap, norm or loss."""
    logits = follow(product, _keeps_logits)
    return not logits.ends and not outputs.isdisjoint(logits.values)


def _keeps_logits(user: Node, logits: Collection[Node]) -> bool:
    """Return True if an operation returns logits again, or a number computed from them."""
    if user.moves or user.op in _KEEPING_LOGITS:
        return True
    return user.op in _OF_LOGITS_ALONE and user.reads_only(logits)
