"""Norms in a pass, also those written by hand, and the vectors that scale them.

A norm by hand is a product of powers of x and of |x|. Every value gets its powers of one x, in the
order of the pass; constants do not count:

    x                     x^1           any other value is the x of its own powers
    square(x), x * x      x^2
    mean(x^2), var(x)     |x|^2         one number per row
    sqrt(mean(x^2)), |x|  |x|^1         also after + eps, clamp, ...
    rsqrt(mean(x^2))      |x|^-1
    x * rsqrt(...)        x^1 |x|^-1    normalized

A scale vector may multiply x, or 1 / |x|, before the other half of the norm does:
gamma * x * rsqrt(mean(x^2)) is a norm, too.
"""

from collections import Counter
from collections.abc import Callable, Collection
from typing import NamedTuple

from lightning_sv.roles.graph import Graph, Node, follow, plain
from lightning_sv.roles.ops import MEANS, NORMS, STATISTICS
from lightning_sv.roles.types import agreed

#: operation -> exponent of the power that it computes
_EXPONENTS = {"sqrt": 0.5, "rsqrt": -0.5, "square": 2.0, "reciprocal": -1.0}
#: operation -> exponents of its arguments in their product
_PRODUCTS = {"mul": {"self": 1, "other": 1}, "div": {"self": 1, "other": -1}}
#: operations that keep a power of |x|, but for constants
_LIMITS = {"add", "clamp", "clamp_min", "maximum"}
#: operation, and which of its outputs is the mean
_MEAN_OUTPUTS = {("mean", 0), ("var_mean", 1), ("std_mean", 1)}


class ScaledValue(NamedTuple):
    """A normalized value times a scale vector, its factor."""

    value: Node
    factor: Node


class Powers(NamedTuple):
    """The value x^own |x|^size, but for constants."""

    x: Node
    own: float = 1
    size: float = 0

    def raised(self, exponent: float) -> "Powers":
        """Return a power of it."""
        return self._replace(own=self.own * exponent, size=self.size * exponent)

    @property
    def exponents(self) -> tuple[float, float]:
        """Exponents of x and of |x|."""
        return self.own, self.size

    @property
    def is_size(self) -> bool:
        """True for a power of |x| alone."""
        return self.own == 0 and self.size != 0


_SELF = (1, 0)
_SQUARE = (2, 0)
_INVERSE = (0, -1)
_NORMALIZED = (1, -1)


class Norms:
    """Norms of a pass.

    Attributes:
        powers: value -> powers of x that it is; a normalized value is an x again
        normalized: values equal to x / |x|, or LayerNorm's result, without learned factors
    """

    def __init__(self, graph: Graph) -> None:
        self.powers: dict[Node, Powers] = {}
        self.normalized: set[Node] = set()
        self._outputs = graph.outputs
        self._rules: dict[str, Callable[[Node], Powers]] = {
            **dict.fromkeys(STATISTICS, self._powers_of_statistic),
            **dict.fromkeys(MEANS, self._powers_of_mean),
            **dict.fromkeys(_PRODUCTS, self._powers_of_product),
            **dict.fromkeys(_LIMITS, self._powers_of_limit),
            **dict.fromkeys((*_EXPONENTS, "pow"), self._powers_of_power),
        }
        for node in graph.nodes:
            self._add(node)

    def _add(self, node: Node) -> None:
        """Record the powers of a value, and whether it is normalized."""
        powers = self._powers(node)
        if powers.exponents == _NORMALIZED or _is_plain_norm(node):
            powers = Powers(node)
            self.normalized.add(node)
        self.powers[node] = powers
        if self.base(node) in self.normalized:  # a multiple
            self.normalized.add(node)

    def is_statistic(self, value: Node) -> bool:
        """Return True for a power of |x|."""
        return self.powers[value].is_size

    def base(self, value: Node) -> Node:
        """Return x of a constant multiple of x, or of x - mean(x); otherwise the value."""
        powers = self.powers[value]
        if powers.exponents == _SELF:
            return powers.x
        return plain(value)

    def bases(self, value: Node) -> set[Node]:
        """Return the base of a value, and the bases before its learned factors."""
        found: set[Node] = set()
        while value not in found:
            base = self.base(value)
            found.add(base)
            value = _source_of_multiple(base)
        return found

    def _powers(self, node: Node) -> Powers:
        """Return the powers of a value, from those of its inputs."""
        if node.is_fixed:
            return Powers(node)
        if node.moves or _subtracts_mean(node):
            return self.powers[node.first]
        rule = self._rules.get(node.op, Powers)  # without a rule it is an x
        return rule(node)

    def _powers_of_statistic(self, node: Node) -> Powers:
        """Return the power of |x| that var, std or a Euclidean norm returns."""
        order = node.scalars.get("ord", node.scalars.get("p"))
        if order not in (None, 2) or node.output:
            return Powers(node)

        size = 1
        if node.op.startswith("var"):
            size = 2
        return Powers(self.base(node.first), own=0, size=size)

    def _powers_of_product(self, node: Node) -> Powers:
        """Return the product of powers of one x."""
        bases = set()
        own = 0.0
        size = 0.0
        for value, exponent in _factors(node).items():
            powers = self.powers[value].raised(exponent)
            bases.add(powers.x)
            own += powers.own
            size += powers.size
        if len(bases) != 1:
            return Powers(node)
        return Powers(bases.pop(), own, size)

    def _powers_of_limit(self, node: Node) -> Powers:
        """Return |x| again, of |x| + eps or of the larger of |x| and eps."""
        powers = {self.powers[value] for value in node.values if not value.is_const}
        limited = agreed(powers)
        if limited is None or not limited.is_size:
            return Powers(node)
        return limited

    def _powers_of_mean(self, node: Node) -> Powers:
        """Return |x|^2 of a mean or sum of x^2."""
        powers = self.powers[node.first]
        if powers.exponents != _SQUARE:
            return Powers(node)
        return Powers(powers.x, own=0, size=2)

    def _powers_of_power(self, node: Node) -> Powers:
        """Return a power of |x|, or the square of x."""
        powers = self.powers[node.first]
        exponent = _EXPONENTS.get(node.op, node.scalars.get("exponent"))
        is_power = powers.is_size or exponent == 2  # sqrt(x^2) is |x| of each entry
        if not exponent or not is_power:
            return Powers(node)
        return powers.raised(exponent)

    def late_norms(self, product: Node, data: Node) -> list[Node]:
        """Return where `product`, a scale vector times `data`, becomes the scaled output of a norm.

        `data` is one half of a norm, and the returned operations multiply by the other half:

            (gamma * x) * rsqrt(mean(x^2))      data is x
            (gamma * rsqrt(mean(x^2))) * x      data is 1 / |x|

        There are none if something else reads the product too, such as a norm of gamma * x: gamma
        is then a multiplier.
        """
        if product.op != "mul":
            return []
        multiples = follow(product, _is_multiple)
        is_returned = not multiples.values.isdisjoint(self._outputs)
        if is_returned:
            return []
        for end in multiples.ends:
            if not self._completes(end, multiples.values, data):
                return []
        return multiples.ends

    def _completes(self, product: Node, multiples: set[Node], data: Node) -> bool:
        """Return True if `product` multiplies `multiples` of one half of a norm by the other."""
        factors = _factors(product)
        other = agreed(factors.keys() - multiples)
        if other is None:
            return False

        of_data = self.powers[data]
        if of_data.exponents == _INVERSE:
            return product.op == "mul" and of_data.x in self.bases(other)
        of_other = self.powers[other].raised(factors[other])  # a divisor |x| is a factor 1 / |x|
        return of_other.exponents == _INVERSE and of_other.x in self.bases(data)


def _factors(node: Node) -> Counter[Node]:
    """Return factor -> exponent of a product or quotient, but for constants: x * x is x^2."""
    exponents: Counter[Node] = Counter()
    for argument, exponent in _PRODUCTS.get(node.op, {}).items():
        value = node.argument(argument)
        if value is not None and not value.is_const:
            exponents[value] += exponent
    return exponents


def _is_multiple(user: Node, multiples: Collection[Node]) -> bool:
    """Return True for a multiple of one of some values, in its shape."""
    source = _source_of_multiple(user)
    return source in multiples and user.shape == source.shape


def _is_plain_norm(node: Node) -> bool:
    """Return True for the result of a norm's operation without a learned scale vector."""
    if node.op not in NORMS or node.output:
        return False
    weight = node.argument(NORMS[node.op].weight)
    return weight is None or not weight.is_learned


def _subtracts_mean(node: Node) -> bool:
    """Return True for x - mean(x)."""
    if node.op != "sub" or len(node.inputs) != 2:
        return False
    subtracted = plain(node.values[1])
    return (subtracted.op, subtracted.output) in _MEAN_OUTPUTS


def _source_of_multiple(node: Node) -> Node:
    """Return x of a view or copy of x, of x * f and of x / f with fixed f; otherwise the node."""
    if node.moves:
        return node.first
    data = [value for value in node.values if not value.is_fixed]
    if len(data) == 1 and _factors(node)[data[0]] == 1:
        return data[0]
    return node
