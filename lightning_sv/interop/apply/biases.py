"""What is added to a scaled value before the matrices read it.

A vector that moves from its norm into the matrices no longer multiplies the norm's bias, so the
bias must be known: norm(x) * gamma + b is (norm(x) + b / gamma) * gamma. Anything else that is
added, such as positions, a class token or the number of a mask, keeps the vector in its norm.
"""

from collections.abc import Collection
from typing import NamedTuple

from lightning_sv.roles.api import TracedModel
from lightning_sv.roles.graph import PARAM, Node, follow, plain
from lightning_sv.roles.ops import NORMS, PRODUCTS, SUMS
from lightning_sv.roles.types import agreed

#: operations that may insert other numbers
_INSERTING = frozenset({"cat", "addcmul", "addcdiv", "lerp", "where", "masked_fill"})
#: operation -> its argument with a number that it adds or inserts
_NUMBERS = {"constant_pad_nd": "value"} | dict.fromkeys(SUMS, "other")


class Added(NamedTuple):
    """What is added to the scaled values of a vector before matrices read them.

    Attributes:
        bias: name of the one bias of the vector's shape; None if there is none
        others: whether something else is added, or different biases
    """

    bias: str | None = None
    others: bool = False


_OTHERS = Added(others=True)


def added_after(name: str, traced: TracedModel) -> Added:
    """Return what is added to all scaled values of a vector."""
    shape = tuple(traced.named[name].shape)
    sums = {_added_to(scaled.value, shape, traced) for scaled in traced.scaled[name]}
    return agreed(sums) or _OTHERS


def _added_to(scaled: Node, shape: tuple[int, ...], traced: TracedModel) -> Added:
    """Return what is added to one scaled value, anywhere before a matrix reads it."""
    biases: set[str] = set()
    values = follow(scaled, _passes).values
    for value in values:
        if _inserts_numbers(value):
            return _OTHERS
        for addend in _addends(value, values):
            source = plain(addend)
            is_bias = source.op == "parameter" and source.shape == shape
            if is_bias:
                biases |= traced.flow.sources[source]
            elif source.is_fixed:
                return _OTHERS
    if len(biases) > 1:
        return _OTHERS
    return Added(bias=next(iter(biases), None))


def _passes(user: Node, reached: Collection[Node]) -> bool:
    """Return True but for the products of a value and a matrix."""
    return user.op not in PRODUCTS or PARAM not in user.kinds_outside(reached)


def _inserts_numbers(user: Node) -> bool:
    """Return True if an operation may add or insert numbers other than 0."""
    if user.op in _INSERTING:
        return True
    argument = _NUMBERS.get(user.op, "")
    number = user.scalars.get(argument, 0)
    return bool(number)


def _addends(user: Node, reached: Collection[Node]) -> list[Node]:
    """Return what a norm or a sum adds to the value that it reads."""
    if user.op in NORMS:
        return user.arguments([NORMS[user.op].bias])
    if user.op in SUMS:
        return user.outside(reached)
    return []
