"""What is added to a scaled value before the matrices read it.

A vector that moves from its norm into the matrices no longer multiplies the norm's bias, so the
bias must be known: norm(x) * gamma + b is (norm(x) + b / gamma) * gamma. Anything else that is
added, such as positions, a class token or the number of a mask, keeps the vector in its norm.
"""

from lightning_sv.roles.api import TracedModel
from lightning_sv.roles.graph import Node, Walk, plain
from lightning_sv.roles.ops import NORMS, PRODUCTS, SUMS, TERMS

#: something other than biases
OTHERS = frozenset({""})
#: operations that select between values and numbers
_SELECTING = TERMS.keys() - SUMS - {"mul", "div", "true_divide"}


def biases_after(name: str, traced: TracedModel) -> set[frozenset[str]]:
    """Return the biases that are added to each of a vector's scaled values.

    `OTHERS` stands for anything but parameters of the vector's shape.
    """
    shape = tuple(traced.named[name].shape)
    return {_biases(node, shape, traced) for node, _ in traced.scaled.get(name, ())}


def _biases(node: Node, shape: tuple[int, ...], traced: TracedModel) -> frozenset[str]:
    added = _addends(node)
    if added is None:
        return OTHERS
    fixed = [value for value in added if value.is_fixed]
    if not all(plain(value).op == "parameter" for value in fixed):
        return OTHERS
    names = frozenset[str]().union(*(traced.flow.sources[value] for value in fixed))
    fits = all(tuple(traced.named[name].shape) == shape for name in names)
    return names if fits and len(names) == len(fixed) else OTHERS


def _addends(node: Node) -> set[Node] | None:
    """Return the values that are added to a scaled value; None if numbers are added."""
    added = _added_by(node)
    walk = Walk(node)
    for value, argument, user in walk:
        others = user.others(value)
        if user.op in PRODUCTS and any(other.is_learned for other in others):
            continue  # a matrix
        is_product = user.op == "addcmul" and argument != "self"
        if not is_product and _has_numbers(user, others):
            return None
        if user.op in SUMS:
            added.update(others)
        elif is_product:
            added |= _added_by(user)
        walk.follow(user)
    return added


def _added_by(node: Node) -> set[Node]:
    """Return what a norm, or addcmul, adds itself."""
    own = "self" if node.op == "addcmul" else NORMS.get(node.op, ("", "", ""))[2]
    return {value for argument, value in node.inputs if argument == own}


def _has_numbers(user: Node, others: list[Node]) -> bool:
    """Return True if an operation adds or inserts numbers other than 0."""
    scalars = user.scalars
    if user.op in SUMS:
        return bool(scalars.get("other", 0))
    if user.op == "constant_pad_nd":
        return bool(scalars.get("value", 0))
    if user.op == "cat":
        return any(other.is_fixed for other in others)
    if user.op not in _SELECTING:
        return False
    numbers = [scalars[key] for key in ("value", "other", "self") if key in scalars]
    return any(numbers) or not numbers
