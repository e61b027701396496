"""What is added to a scaled value before the matrices read it.

A vector that moves from its norm into the matrices no longer multiplies the norm's bias, so the
bias must be known: norm(x) * gamma + b is (norm(x) + b / gamma) * gamma. Anything else that is
added, such as positions, a class token or the number of a mask, keeps the vector in its norm.
"""

from lightning_sv.roles.api import TracedModel
from lightning_sv.roles.graph import Node, Walk, plain
from lightning_sv.roles.ops import NORMS, PRODUCTS, SUMS

#: operations that may insert other numbers
_INSERTING = frozenset({"cat", "addcmul", "addcdiv", "lerp", "where", "masked_fill"})
#: operation -> its argument with a number that it adds or inserts
_NUMBERS = {"constant_pad_nd": "value"} | dict.fromkeys(SUMS, "other")


def biases_after(name: str, traced: TracedModel) -> frozenset[str] | None:
    """Return the biases of the vector's shape that are added to all scaled values of a vector.

    None if something else is added, or different biases.
    """
    shape = tuple(traced.named[name].shape)
    scaled = traced.scaled.get(name)
    if not scaled:
        return frozenset()
    found = {_biases(node, shape, traced) for node, _ in scaled}
    return found.pop() if len(found) == 1 else None


def _biases(node: Node, shape: tuple[int, ...], traced: TracedModel) -> frozenset[str] | None:
    added = _addends(node)
    if added is None:
        return None
    fixed = [plain(value) for value in added if value.is_fixed]
    if not all(value.op == "parameter" and value.shape == shape for value in fixed):
        return None
    return frozenset[str]().union(*(traced.flow.sources[value] for value in fixed))


def _addends(node: Node) -> set[Node] | None:
    """Return the values that are added to a scaled value; None if numbers are added."""
    added = _added_by(node)
    walk = Walk(node)
    for value, argument, user in walk:
        others = user.others(value)
        if user.op in PRODUCTS and any(other.is_learned for other in others):
            continue  # a matrix
        if user.op == "addcmul" and argument != "self":
            added |= _added_by(user)
        elif _inserts_numbers(user):
            return None
        elif user.op in SUMS:
            added.update(others)
        walk.follow(user)
    return added


def _added_by(node: Node) -> set[Node]:
    """Return what a norm, or addcmul, adds itself."""
    own = "self" if node.op == "addcmul" else NORMS.get(node.op, ("", "", ""))[2]
    return set(node.arguments([own]))


def _inserts_numbers(user: Node) -> bool:
    """Return True if an operation may add or insert numbers other than 0."""
    number = user.scalars.get(_NUMBERS.get(user.op, ""), 0)
    return user.op in _INSERTING or bool(number)
