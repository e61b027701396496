"""Norms in a pass, also those written by hand, and the vectors that scale them.

A norm by hand is found by its factors, with any constants between them:

    mean square   mean(x^2), var(x)       (x, 2)
    root          sqrt of it, |x|, std(x) (x, 1)
    inverse       rsqrt of it, 1 / root   (x, -1)

x times an inverse of x, or x over a root of x, is normalized. A scale vector may multiply x first:
gamma * x * rsqrt(mean(x^2)) is a norm too.
"""

from collections.abc import Collection
from typing import NamedTuple

from lightning_sv.roles.graph import CONST, PARAM, Graph, Node, Walk, plain
from lightning_sv.roles.ops import NORMS, STATISTICS

#: power of a statistic
_SQUARE = 2.0
_ROOT = 1.0
_INVERSE = -1.0
#: operation -> power to which it raises a statistic
_POWERS = {"sqrt": 0.5, "rsqrt": -0.5, "square": 2, "reciprocal": -1}
#: operation -> power of the statistic of x by which it normalizes x
_NORMALIZING = {"mul": _INVERSE, "div": _ROOT}
_KEEP_SUM = {"add", "sub", "mul", "div"}
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
        computed = [node for node in graph.nodes if node.inputs and not node.is_learned]
        for node in computed:
            statistic = self._statistic(node)
            if statistic is not None:
                self.statistics[node] = statistic
            if self._is_normalized(node):
                self.normalized.add(node)

    def _statistic(self, node: Node) -> Statistic | None:
        if node.op in STATISTICS:
            return _measured_statistic(node)
        if node.op in ("mean", "sum"):
            return _mean_square(node)
        known = [value for value in node.values if value in self.statistics]
        return self._changed_statistic(node, known[0]) if known else None

    def _changed_statistic(self, node: Node, value: Node) -> Statistic | None:
        """Return what an operation makes of a value that is a statistic."""
        known = self.statistics[value]
        exponent = _exponent(node)
        if exponent is not None:
            return Statistic(known.of, known.power * exponent)
        keeps = node.moves or node.op in _KEEP_STATISTIC
        kinds_of_others = {other.kind for other in node.values if other not in self.statistics}
        return known if keeps and kinds_of_others <= {CONST} else None

    def _is_normalized(self, node: Node) -> bool:
        if node.op in NORMS:
            weight = node.argument(NORMS[node.op][1])
            return node.output == 0 and (weight is None or not weight.is_learned)
        if node.moves:
            return node.first in self.normalized
        norm = self._norm_in(node)
        if norm is not None:
            return self.statistics[norm].of in map(stem, node.others(norm))
        return _multiplied(node, {CONST}) in self.normalized

    def _norm_in(self, node: Node) -> Node | None:
        """Return the inverse by which a product multiplies, or the root by which it divides."""
        power = _NORMALIZING.get(node.op)
        factors = node.values[1:] if node.op == "div" else node.values
        known = (value for value in factors if value in self.statistics)
        return next((value for value in known if self.statistics[value].power == power), None)

    def late_norms(self, product: Node, data: Node) -> list[Node]:
        """Return where `product`, a scale vector times `data`, becomes the scaled output of a norm.

        `data` is one half of a norm, x or 1/|x|, and each of these nodes multiplies the product
        with the other half. There are none if something else reads the product too, such as a norm
        of gamma * x: gamma is then a multiplier.
        """
        if product.op != "mul" or not self._is_half(data):
            return []
        ends: list[Node] = []
        walk = Walk(product)
        for value, _, user in walk:
            if self._completes(user, value, data):
                ends.append(user)
            elif _is_fixed_multiple(user, value):
                walk.follow(user)
            else:
                return []
        return [] if walk.seen & self._outputs else ends

    def products_with(self, total: Node) -> list[Node]:
        """Return the products of a sum with outputs of norms; empty if anything else reads it."""
        products: list[Node] = []
        walk = Walk(total)
        for value, _, user in walk:
            others = set(user.others(value))
            if user.op == "mul" and others & self.normalized:
                products.append(user)
            elif user.moves or (user.op in _KEEP_SUM and user.reads_only({value})):
                walk.follow(user)
            else:
                return []
        return [] if walk.seen & self._outputs else products

    def _is_half(self, data: Node) -> bool:
        known = self.statistics.get(data)
        return known is None or known.power == _INVERSE

    def _completes(self, user: Node, value: Node, data: Node) -> bool:
        """Return True if an operation multiplies a value by the other half of a norm."""
        known = self.statistics.get(data)
        if known is not None:  # 1/|x|, which x completes
            halves = [stems(other) for other in user.others(value)]
            return user.op == "mul" and any(known.of in half for half in halves)
        norm = self._norm_in(user)
        if norm is None or user.others(norm) != [value]:
            return False
        return self.statistics[norm].of in stems(data)


def _measured_statistic(node: Node) -> Statistic | None:
    """Return the statistic of var, std or a Euclidean norm."""
    order = node.scalars.get("ord", node.scalars.get("p", 2))
    if order not in (None, 2) or node.output:
        return None
    power = _SQUARE if node.op.startswith("var") else _ROOT
    return Statistic(stem(node.first), power)


def _mean_square(mean: Node) -> Statistic | None:
    """Return the statistic of the mean or sum of x^2 or x * x; None of other values."""
    square = plain(mean.first)
    bases = {stem(value) for value in square.values}
    is_square = _exponent(square) == 2 or (square.op == "mul" and len(square.inputs) == 2)
    return Statistic(bases.pop(), _SQUARE) if is_square and len(bases) == 1 else None


def _exponent(node: Node) -> float | None:
    exponent = node.scalars.get("exponent") if node.op == "pow" else _POWERS.get(node.op)
    return exponent if isinstance(exponent, (int, float)) else None


def _is_fixed_multiple(user: Node, value: Node) -> bool:
    """Return True for a value that is moved, or multiplied by what does not depend on data."""
    is_multiple = user.moves or _multiplied(user, {CONST, PARAM}) is value
    return is_multiple and user.shape == value.shape


def stem(node: Node) -> Node:
    """Return `node` before views, copies, constant factors, and subtraction of its mean."""
    while True:
        node = plain(node)
        source = _without_mean(node) or _multiplied(node, {CONST})
        if source is None:
            return node
        node = source


def stems(node: Node) -> set[Node]:
    """Return the stem of `node`, and the stems before its parameter factors."""
    found = set()
    value: Node | None = node
    while value is not None:
        value = stem(value)
        found.add(value)
        value = _multiplied(value, {CONST, PARAM})
    return found


def _without_mean(node: Node) -> Node | None:
    """Return x of x - mean(x); None for another operation."""
    if node.op != "sub" or len(node.inputs) != 2:
        return None
    return node.first if _is_mean(plain(node.values[1])) else None


def _is_mean(node: Node) -> bool:
    return node.op == "mean" or (node.op in ("var_mean", "std_mean") and node.output == 1)


def _multiplied(node: Node, kinds: Collection[int]) -> Node | None:
    """Return x of x * f, f * x and x / f with factors f of these kinds; None for others."""
    others = [value for value in node.values if value.kind not in kinds]
    if node.op not in _NORMALIZING or len(others) != 1:
        return None
    is_divisor = node.op == "div" and others[0] is not node.first
    return None if is_divisor else others[0]
