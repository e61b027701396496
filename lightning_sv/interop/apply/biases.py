"""What is added to a scaled value before the matrices read it.

A vector that moves from its norm into the matrices no longer multiplies the norm's bias, so the
bias must be known: norm(x) * gamma + b is (norm(x) + b / gamma) * gamma. Anything else that is
added, such as positions, a class token or the number of a mask, keeps the vector in its norm.
"""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from lightning_sv.roles.api import TracedModel
from lightning_sv.roles.graph import PARAM, Node, follow, plain
from lightning_sv.roles.ops import MULTIPLIED, NO_NORM, NORMS, PRODUCTS, SUMS
from lightning_sv.roles.types import agreed

#: operations that may insert other numbers
_INSERTING = frozenset({"cat", "addcmul", "addcdiv", "lerp", "where", "masked_fill"})
#: operation -> its argument with a number that it adds or inserts
_NUMBERS = {"constant_pad_nd": "value"} | dict.fromkeys(SUMS, "other")
#: stands for numbers that an operation adds or inserts
_NUMBER = Node("number", (), ())
#: stands for the name of anything but a bias of the vector's shape
_OTHER = ""


class Added(NamedTuple):
    """What is added to the scaled values of a vector before matrices read them.

    Attributes:
        bias: name of the one bias of the vector's shape; None if there is none
        others: whether something else is added, or different biases
    """

    bias: str | None = None
    others: bool = False


def added_after(name: str, traced: TracedModel) -> Added:
    """Return what is added to all scaled values of a vector."""
    shape = tuple(traced.named[name].shape)
    sums = {_names_added(scaled.value, shape, traced) for scaled in traced.scaled[name]}
    names = agreed(sums)
    if names is None or len(names) > 1 or _OTHER in names:
        return Added(others=True)
    return Added(bias=next(iter(names), None))


def _names_added(node: Node, shape: tuple[int, ...], traced: TracedModel) -> frozenset[str]:
    """Return the names of the biases of a shape that are added to a scaled value, or `_OTHER`."""
    names: set[str] = set()
    for value in _addends(node):
        source = plain(value)
        if source.op == "parameter" and source.shape == shape:
            names |= traced.flow.sources[source]
        elif source.is_fixed:
            names.add(_OTHER)
    return frozenset(names)


def _addends(node: Node) -> Iterator[Node]:
    """Yield what is added to a scaled value, or inserted into it, anywhere before a matrix."""
    yield from _added_by(node)
    reached = follow(node, _passes).values
    for user in reached - {node}:
        if user.op == "addcmul" and user.argument("self") not in reached:
            yield from _added_by(user)
        elif _inserts_numbers(user):
            yield _NUMBER
        elif user.op in SUMS:
            yield from user.outside(reached)


def has_learned_factor(norm: Node) -> bool:
    """Return True if a parameter multiplies the values of a norm before a matrix does."""
    values = follow(norm, _passes).values
    for user in values - {norm}:
        if user.op in MULTIPLIED and PARAM in user.kinds_outside(values):
            return True
    return False


def _passes(user: Node, reached: Collection[Node]) -> bool:
    """Return True but for the products of a value and a matrix."""
    return user.op not in PRODUCTS or PARAM not in user.kinds_outside(reached)


def _added_by(node: Node) -> list[Node]:
    """Return what a norm, or addcmul, adds itself."""
    argument = NORMS.get(node.op, NO_NORM).bias
    if node.op == "addcmul":
        argument = "self"
    return node.arguments([argument])


def _inserts_numbers(user: Node) -> bool:
    """Return True if an operation may add or insert numbers other than 0."""
    number = user.scalars.get(_NUMBERS.get(user.op, ""), 0)
    return user.op in _INSERTING or bool(number)
