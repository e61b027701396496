"""Norms in a pass, also those written by hand, and the vectors that scale them.

A norm by hand is found by its factors, in any order and with any constants between them:

    mean square   mean(x^2), var(x), E[x^2] - E[x]^2     (x, 2)
    root          sqrt of it, |x|, std(x)                (x, 1)
    inverse       rsqrt of it, 1 / root                  (x, -1)

x times an inverse of x, or x over a root of x, is normalized. A scale vector may multiply any of
the factors first: gamma * x * rsqrt(mean(x^2)) and x * (gamma * rsqrt(mean(x^2))) are norms too.
"""

from typing import NamedTuple

from lightning_sv.roles.graph import Graph, Node, Walk, plain
from lightning_sv.roles.ops import NORMS, STATISTICS, SUMS

#: power of a statistic
_SQUARE = 2.0
_ROOT = 1.0
_INVERSE = -1.0
#: operation -> power to which it raises a statistic
_POWERS = {"sqrt": 0.5, "rsqrt": -0.5, "square": 2, "reciprocal": -1}
_KEEP_STATISTIC = {"add", "mul", "div", "clamp", "clamp_min", "maximum", "expand"}


class Statistic(NamedTuple):
    """A value that is |x| to some power, but for constants."""

    of: Node  #: x
    power: float


class Norms:
    """Norms of a pass.

    Attributes:
        statistics: value -> the statistic that it is
        normalized: values equal to x / |x|, or LayerNorm's result, without learned factors
    """

    def __init__(self, graph: Graph) -> None:
        self.statistics: dict[Node, Statistic] = {}
        self.normalized: set[Node] = set()
        self._outputs = graph.outputs
        for node in graph.nodes:
            if node.is_learned or not node.inputs:
                continue
            statistic = self._statistic(node)
            if statistic is not None:
                self.statistics[node] = statistic
            if self._is_normalized(node):
                self.normalized.add(node)

    def _power(self, node: Node) -> float:
        """Return the power of a statistic; 0 for any other value."""
        statistic = self.statistics.get(node)
        return 0 if statistic is None else statistic.power

    def _statistic(self, node: Node) -> Statistic | None:
        if node.op in STATISTICS:
            return _measured_statistic(node)
        if node.op in ("mean", "sum"):
            base = _squared(node.first)
            return None if base is None else Statistic(stem(base), _SQUARE)
        for value in node.values:
            if value in self.statistics:
                return self._changed_statistic(node, self.statistics[value])
        return None

    def _changed_statistic(self, node: Node, known: Statistic) -> Statistic | None:
        """Return what an operation makes of a statistic."""
        exponent = _exponent(node)
        if exponent is not None:
            return Statistic(known.of, known.power * exponent)
        others = [value for value in node.values if value not in self.statistics]
        if node.op == "sub":
            return known if _is_variance(node, known, others) else None
        keeps = node.moves or node.op in _KEEP_STATISTIC
        return known if keeps and all(value.is_const for value in others) else None

    def _is_normalized(self, node: Node) -> bool:
        if node.op in NORMS:
            weight = node.argument(NORMS[node.op][1])
            return node.output == 0 and (weight is None or not weight.is_learned)
        if node.moves:
            return node.first in self.normalized
        if node.op not in ("mul", "div"):
            return False
        norm = self._divisor(node)
        if norm is None:
            return self._is_constant_multiple(node)
        normed = self.statistics[norm].of
        return normed in map(stem, node.others(norm))

    def _is_constant_multiple(self, product: Node) -> bool:
        """Return True for a normalized value times constants."""
        factors = [value for value in product.values if value not in self.normalized]
        has_normalized = len(factors) < len(product.inputs)
        return has_normalized and all(value.is_const for value in factors)

    def _divisor(self, node: Node) -> Node | None:
        """Return the inverse by which a product multiplies, or the root by which it divides."""
        if node.op == "mul":
            return next((value for value in node.values if self._power(value) == _INVERSE), None)
        divisor = node.argument("other")
        return divisor if divisor is not None and self._power(divisor) == _ROOT else None

    def late_norms(self, product: Node, data: Node) -> list[Node]:
        """Return where `product`, a scale vector times `data`, becomes the scaled output of a norm.

        `data` is one half of a norm, x or 1/|x|, and each of these nodes multiplies it with the
        other half. There are none if something else reads the product too, such as a norm of
        gamma * x: gamma is then a multiplier.
        """
        if not self._is_half(product, data):
            return []
        ends: list[Node] = []
        walk = Walk(product)
        for value, argument, user in walk:
            if user.is_const or user in walk.seen or user in ends:
                continue
            if _is_fixed_multiple(user, value, argument):
                walk.follow(user)
            elif _scales_once(user, value, argument) and self._completes(user, value, data):
                ends.append(user)
            else:
                return []
        return [] if walk.seen & self._outputs else ends

    def _is_half(self, product: Node, data: Node) -> bool:
        power = self._power(data)
        if product.op == "div":
            return power == _ROOT and product.argument("other") is data
        return product.op == "mul" and power in (0, _INVERSE)

    def _completes(self, user: Node, value: Node, data: Node) -> bool:
        """Return True if a product or a quotient of a value completes the norm of `data`."""
        other = user.others(value)[0]
        if self._power(data):  # 1/|x|, which x completes
            return user.op == "mul" and self.statistics[data].of in stems(other)
        wanted = _INVERSE if user.op == "mul" else _ROOT
        return self._power(other) == wanted and self.statistics[other].of in stems(data)

    def products_with(self, total: Node) -> list[Node]:
        """Return the products of a sum with outputs of norms; empty if anything else reads it."""
        products: list[Node] = []
        walk = Walk(total)
        for value, _, user in walk:
            if user.is_const or user in walk.seen:
                continue
            if user.moves or (user.op in SUMS | {"mul", "div"} and user.is_alone(value)):
                walk.follow(user)
            elif user.op == "mul" and self.normalized.intersection(user.others(value)):
                products.append(user)
            else:
                return []
        return [] if walk.seen & self._outputs else products


def _measured_statistic(node: Node) -> Statistic | None:
    """Return the statistic of var, std or a Euclidean norm."""
    order = node.scalars.get("ord", node.scalars.get("p", 2)) or 2
    if float(order) != 2 or node.output:
        return None
    power = _SQUARE if node.op.startswith("var") else _ROOT
    return Statistic(stem(node.first), power)


def _exponent(node: Node) -> float | None:
    exponent = node.scalars.get("exponent") if node.op == "pow" else _POWERS.get(node.op)
    return exponent if isinstance(exponent, (int, float)) else None


def _squared(node: Node) -> Node | None:
    """Return x of x^2 or x * x; None for another operation."""
    node = plain(node)
    if _exponent(node) == 2:
        return node.first
    if node.op != "mul" or len(node.inputs) != 2:
        return None
    first, second = node.values
    return first if stem(first) is stem(second) else None


def _is_variance(difference: Node, known: Statistic, others: list[Node]) -> bool:
    """Return True for E[x^2] - E[x]^2."""
    if known.power != _SQUARE or len(others) != 1 or others[0] is difference.first:
        return False
    base = _squared(others[0])
    if base is None:
        return False
    mean = plain(base)
    return _is_mean(mean) and stem(mean.first) is known.of


def _is_mean(node: Node) -> bool:
    return node.op == "mean" or (node.op in ("var_mean", "std_mean") and node.output == 1)


def _scales_once(user: Node, value: Node, argument: str) -> bool:
    """Return True for a product or a quotient that is linear in a value, not its square."""
    scales = user.op == "mul" or (user.op == "div" and argument == "self")
    return scales and len(user.others(value)) == len(user.inputs) - 1


def _is_fixed_multiple(user: Node, value: Node, argument: str) -> bool:
    """Return True for a value that is moved, or multiplied by what does not depend on data."""
    if user.shape != value.shape:
        return False
    return user.moves or (_scales_once(user, value, argument) and user.is_alone(value))


def stem(node: Node) -> Node:
    """Return `node` before views, copies, constant factors, and subtraction of its mean."""
    before: Node | None = node
    while before is not None:
        node = plain(before)
        before = _without_constant(node)
    return node


def _without_constant(node: Node) -> Node | None:
    """Return x of x - mean(x), x / c, x * c or c * x; None for another operation."""
    if node.op not in ("sub", "mul", "div"):
        return None
    first, *rest = node.values
    if node.op == "sub":
        return first if len(rest) == 1 and _is_mean(plain(rest[0])) else None
    if all(value.is_const for value in rest):
        return first
    is_factor = node.op == "mul" and first.is_const and len(rest) == 1
    return rest[0] if is_factor else None


def stems(node: Node) -> set[Node]:
    """Return the stem of `node`, and the stems before its parameter factors."""
    node = stem(node)
    found = {node}
    while True:
        factor = _scaled_data(node)
        if factor is None:
            return found
        node = stem(factor)
        found.add(node)


def _scaled_data(node: Node) -> Node | None:
    """Return the data of data times a parameter, or data over one; None for another operation."""
    if node.op not in ("mul", "div") or len(node.inputs) != 2:
        return None
    data = [value for value in node.values if not value.is_fixed]
    if len(data) != 1 or (node.op == "div" and data[0] is not node.first):
        return None
    return data[0]
