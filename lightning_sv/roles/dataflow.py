"""Dataflow of a traced pass: parameters in each value, and normalized values."""

import math

import torch

from lightning_sv.roles.ops import CHOICES_OF_ROWS, MULTIPLIED, NORMS, PRODUCTS, STATISTICS, SUMS, TRANSPOSED
from lightning_sv.roles.trace import CONST, PARAM, Graph, Node, Walk

#: exponent of the input's norm in a statistic: mean square, its root, and the root's inverse
_SQUARE, _ROOT, _INVERSE = 2.0, 1.0, -1.0
#: operation -> power to which it raises a statistic
_POWERS = {"sqrt": 0.5, "rsqrt": -0.5, "square": 2, "reciprocal": -1}
_KEEP_STATISTIC = {"add", "mul", "div", "clamp", "clamp_min", "maximum", "expand"}
_ONES = {"ones", "ones_like", "new_ones"}


def contraction(product: Node, name: str, operand: Node) -> int:
    """Return the axis of `operand`, argument `name` of `product`, that the product sums over."""
    _, matrix = PRODUCTS[product.op]
    axes = len(operand.shape)
    if "convolution" in product.op:
        return 1
    if axes == 1 or name != matrix or product.op in TRANSPOSED:
        return axes - 1
    return axes - 2


def moved(source: Node, result: Node, axes: frozenset[int]) -> frozenset[int]:
    """Return the axes of `result`, a view or an elementwise result, that correspond to `axes` of `source`.

    In a view by strides, an axis of the view corresponds to the axes of the source whose strides it covers, possibly
    several. Broadcast axes (stride 0) correspond to all requested axes.
    """
    if not result.is_view:
        shift = len(result.shape) - len(source.shape)
        return frozenset(axis + shift for axis in axes if axis + shift >= 0)
    spans = {i: (s, s * n) for i, (s, n) in enumerate(zip(source.stride, source.shape, strict=True)) if n > 1}
    result_axes = set()
    for axis, (step, size) in enumerate(zip(result.stride, result.shape, strict=True)):
        if size == 1:
            continue
        if step == 0:
            result_axes.add(axis)
            continue
        covered = {i for i, (low, high) in spans.items() if low < step * size and high > step and low > 0}
        # a broadcast axis corresponds to all
        covered -= {i for i in covered if source.stride[i] == 0}
        if covered & axes:
            result_axes.add(axis)
    return frozenset(result_axes)


class Dataflow:
    """Attributes of the nodes of `graph`, computed in the order of the pass.

    Attributes:
        sources: names of the parameters in a PARAM node
        normalized: nodes equal to x / |x|, or LayerNorm's result, without learned factors
        statistics: mean squares, their roots and inverses: (input, exponent)
        factors: parameters that multiplied rows or columns of a PARAM node, not among its sources
        tables: PARAM nodes that are rows of a parameter, selected by position and not by data
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.sources: dict[Node, frozenset[str]] = {node: frozenset({name}) for name, node in graph.parameters.items()}
        self.normalized: set[Node] = set()
        self.factors: dict[Node, frozenset[str]] = {}
        self.tables: set[Node] = set()
        self.statistics: dict[Node, tuple[Node, float]] = {}
        for node in graph.nodes:
            if node.kind == PARAM:
                if node.inputs:
                    self._derive(node)
            else:
                if (statistic := self._statistic(node)) is not None:
                    self.statistics[node] = statistic
                if self._is_normalized(node):
                    self.normalized.add(node)

    def _derive(self, node: Node) -> None:
        """Record the sources of a value that depends on parameters only."""
        selected = ("self",) if node.op in CHOICES_OF_ROWS else PRODUCTS.get(node.op, ())  # no index, no bias
        operands = [v for name, v in node.inputs if v.kind == PARAM and (not selected or name in selected)]
        factors = [v for v in operands if _is_factor(v, node)]
        tables = [v for v in operands if v not in factors]
        self.sources[node] = frozenset().union(*(self.sources[v] for v in tables))
        inherited = [self.factors.get(v, frozenset()) for v in operands]
        self.factors[node] = frozenset().union(*inherited, *(self.sources[v] for v in factors))
        if _chooses_rows(node) or (node.moves and any(v in self.tables for v in operands)):
            self.tables.add(node)

    def _statistic(self, node: Node) -> tuple[Node, float] | None:
        """Return (input, exponent) of a mean square or a power of it."""
        if not node.inputs:
            return None
        value = node.inputs[0][1]
        if node.op in STATISTICS:
            euclidean = float(node.scalars.get("ord", node.scalars.get("p", 2)) or 2) == 2
            power = _SQUARE if node.op.startswith("var") else _ROOT
            return (stem(value), power) if euclidean and not node.output else None
        if node.op in ("mean", "sum"):
            base = _squared(plain(value))
            return None if base is None else (stem(base), _SQUARE)
        known = next((self.statistics[v] for _, v in node.inputs if v in self.statistics), None)
        if known is None:
            return None
        source, power = known
        exponent = node.scalars.get("exponent") if node.op == "pow" else _POWERS.get(node.op)
        if isinstance(exponent, (int, float)):
            return source, power * exponent
        rest = [v for _, v in node.inputs if v not in self.statistics]
        if node.op == "sub" and power == _SQUARE and value in self.statistics and len(rest) == 1:
            mean = _squared(plain(rest[0]))  # E[x^2] - E[x]^2
            mean = None if mean is None else plain(mean)
            return known if mean is not None and _is_mean(mean) and stem(mean.inputs[0][1]) is source else None
        keeps = node.moves or node.op in _KEEP_STATISTIC
        return known if keeps and all(v.kind == CONST for v in rest) else None

    def _is_normalized(self, node: Node) -> bool:
        if node.op in NORMS:
            weight = node.argument(NORMS[node.op][1])
            return node.output == 0 and (weight is None or weight.kind != PARAM)
        inputs = [value for _, value in node.inputs]
        if node.moves:
            return bool(inputs) and inputs[0] in self.normalized
        if node.op not in ("mul", "div"):
            return False
        for name, value in node.inputs:
            of, power = self.statistics.get(value, (None, 0))
            if power == (_INVERSE if node.op == "mul" else _ROOT) and (node.op == "mul" or name == "other"):
                return any(stem(other) is of for other in node.others(value))
        normalized = [value for value in inputs if value in self.normalized]
        return bool(normalized) and all(value in normalized or value.kind == CONST for value in inputs)

    def late_norms(self, product: Node, data: Node) -> list[Node]:
        """Return the nodes at which `product`, a scale vector times `data`, becomes the scaled output of a norm.

        For instance gamma * x * rsqrt(mean(x^2)) and x * (gamma * rsqrt(mean(x^2))): the vector multiplies the data, x,
        1/|x| or |x|, before these are multiplied with each other. There are none if something else reads the product
        too, such as a norm of gamma * x: gamma is then a multiplier.
        """
        of, power = self.statistics.get(data, (data, 0))
        inverse = power == (_ROOT if product.op == "div" else _INVERSE)
        if product.op == "div" and (not inverse or product.argument("other") is not data):
            return []
        if product.op not in ("mul", "div") or (power and not inverse):
            return []
        ends: list[Node] = []
        walk = Walk(product)
        for value, argument, user in walk:
            if user.kind == CONST or user in walk.seen or user in ends:
                continue
            others = user.others(value)
            scaled = user.op == "mul" or (user.op == "div" and argument == "self")
            scaled = scaled and len(others) == len(user.inputs) - 1  # not squared
            factors = scaled and user.is_alone(value)
            if user.shape == value.shape and (user.moves or factors):
                walk.follow(user)
            elif scaled and self._is_other_half(others[0], user.op, data, of if inverse else None):
                ends.append(user)
            else:
                return []
        return [] if walk.seen & self.graph.outputs else ends

    def _is_other_half(self, other: Node, op: str, data: Node, of: Node | None) -> bool:
        """Return True if `other` is the missing half of the norm: x (`of`), or a statistic of x."""
        if of is not None:
            return op == "mul" and of in stems(other)
        found, power = self.statistics.get(other, (None, 0))
        return power == (_INVERSE if op == "mul" else _ROOT) and found in stems(data)

    def factors_of_norms(self, total: Node) -> list[Node]:
        """Return the products of `total`, a sum, with outputs of norms; empty if anything else reads the sum."""
        products: list[Node] = []
        walk = Walk(total)
        for value, _, user in walk:
            if user.kind == CONST or user in walk.seen:
                continue
            others = user.others(value)
            if user.moves or (user.op in SUMS | {"mul", "div"} and user.is_alone(value)):
                walk.follow(user)
            elif user.op == "mul" and any(other in self.normalized for other in others):
                products.append(user)
            else:
                return []
        return [] if walk.seen & self.graph.outputs else products

    def is_linear(self, operand: Node) -> bool:
        """Return True if a column factor of `operand` is a column factor of one of its parameters.

        This holds if the parameters are moved, selected, joined, cast, or multiplied by others. It does not hold
        if they are normalized, because a factor of one column then changes all.
        """
        operand = plain(operand)
        values = [value for _, value in operand.inputs]
        if operand.op == "parameter":
            return True
        if operand.op in CHOICES_OF_ROWS:
            return self.is_linear(values[0])
        if operand.op in ("cat", "stack"):
            return all(value.kind == PARAM and self.is_linear(value) for value in values)
        if operand.op not in ("mul", "div"):
            return False
        largest = max((value for value in values if value.kind == PARAM), key=_size)
        names = self.sources[largest] | self.factors.get(largest, frozenset())
        for value in values:
            if value.kind == PARAM and value is not largest:
                sources = self.sources[value] | self.factors.get(value, frozenset())
                if sources & names or _size(value) == _size(largest):
                    return False
        is_factor = values.count(largest) == 1 and (operand.op == "mul" or values[0] is largest)
        return is_factor and self.is_linear(largest)

    def contracted_axis(self, operand: Node, product: Node, name: str) -> int | None:
        """Return the parameter's own axis over which `product` sums, from its strides; None if mixed."""
        axis: int | None = contraction(product, name, operand)
        while axis is not None and operand.op != "parameter":
            learned = [value for _, value in operand.inputs if self.sources.get(value)]
            if not learned:
                return None
            size = math.prod(operand.shape)
            source = next((value for value in learned if math.prod(value.shape) == size), learned[0])
            candidates = [i for i in range(len(source.shape)) if axis in moved(source, operand, frozenset({i}))]
            axis = candidates[0] if len(candidates) == 1 else None
            operand = source
        return axis


def _is_factor(value: Node, product: Node) -> bool:
    """Return True if a product multiplies a larger table of parameters by `value`, or a constant table by a number.

    A number of a constant table is the b of b * I.
    """
    if product.op not in MULTIPLIED:
        return False
    others = product.others(value)
    if _size(value) == 1:
        return any(_size(other) > 1 for other in others)
    return any(other.kind == PARAM and _size(other) > _size(value) for other in others)


def _chooses_rows(node: Node) -> bool:
    """Return True for several rows of a table, selected by position: `table[:, :n]` or `table[positions]`."""
    if node.op not in CHOICES_OF_ROWS and node.op != "slice":
        return False
    table, *indices = (value for _, value in node.inputs)  # the table is the first input of these operations
    keeps_columns = node.shape[-1:] == table.shape[-1:] != (1,)
    if not keeps_columns or max(node.shape[:-1], default=0) <= 1:
        return False
    if node.op == "slice":
        return node.shape != table.shape
    return all(index.kind == CONST for index in indices)


def _size(node: Node) -> int:
    """Return the number of elements, without those repeated by broadcasting."""
    if len(node.stride) != len(node.shape):
        return math.prod(node.shape)
    return math.prod(size for size, step in zip(node.shape, node.stride, strict=True) if step)


def plain(node: Node) -> Node:
    """Return `node` before views and copies."""
    while node.inputs and node.moves:
        node = node.inputs[0][1]
    return node


def stem(node: Node) -> Node:
    """Return `node` before views, copies, constant factors, and subtraction of a mean or a constant."""
    while True:
        node = plain(node)
        before = _without_constant(node)
        if before is None:
            return node
        node = before


def _without_constant(node: Node) -> Node | None:
    """Return x of x - mean(x), of x / c, and of x * c or c * x with a constant c; None for another operation."""
    if node.op not in ("sub", "mul", "div"):
        return None
    first, *rest = (value for _, value in node.inputs)
    if node.op == "sub":
        return first if len(rest) == 1 and _is_mean(plain(rest[0])) else None
    if all(value.kind == CONST for value in rest):
        return first
    if node.op == "mul" and first.kind == CONST and len(rest) == 1:
        return rest[0]
    return None


def stems(node: Node) -> set[Node]:
    """Return the stem of `node`, and the stems before its parameter factors."""
    found = {node := stem(node)}
    while node.op in ("mul", "div"):
        data = [value for _, value in node.inputs if value.kind not in (CONST, PARAM)]
        if len(data) != 1 or len(node.inputs) != 2 or (node.op == "div" and data[0] is not node.inputs[0][1]):
            break
        found.add(node := stem(data[0]))
    return found


def _is_mean(node: Node) -> bool:
    return node.op == "mean" or (node.op in ("var_mean", "std_mean") and node.output == 1)


def _squared(node: Node) -> Node | None:
    if node.op == "square" or (node.op == "pow" and node.scalars.get("exponent") == 2):
        return node.inputs[0][1]
    if node.op == "mul" and len(node.inputs) == 2 and stem(node.inputs[0][1]) is stem(node.inputs[1][1]):
        return node.inputs[0][1]
    return None


def value_at(factor: Node, at: float) -> float | None:
    """Return the factor of a scale vector whose parameter is `at`; None if it is not a single number."""
    if factor.op == "parameter":
        return at
    learned = [value for _, value in factor.inputs if value.kind == PARAM]
    base = value_at(learned[0], at) if len(learned) == 1 else None
    if base is None or (factor.moves and factor.op != "neg"):
        return base
    if not factor.pointwise or any(v.kind != PARAM and v.op not in _ONES for _, v in factor.inputs):
        return None
    numbers = {name: torch.tensor(base if v.kind == PARAM else 1.0, dtype=torch.float64) for name, v in factor.inputs}
    return float(factor.call(**numbers, **factor.scalars))
