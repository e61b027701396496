"""Dataflow of a traced pass: the parameters in each value, and normalized values."""

import math

import torch

from lightning_sv.roles.axes import contraction, moved
from lightning_sv.roles.graph import Graph, Node, plain
from lightning_sv.roles.norms import Norms
from lightning_sv.roles.ops import CHOICES_OF_ROWS, MULTIPLIED, PRODUCTS

_ONES = {"ones", "ones_like", "new_ones"}


class Dataflow:
    """Attributes of the nodes of `graph`, computed in the order of the pass.

    Attributes:
        norms: norms of the pass
        sources: names of the parameters in a value made of parameters alone
        factors: parameters that multiplied rows or columns of such a value, not among its sources
        tables: such values that are rows of a parameter, selected by position and not by data
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.norms = Norms(graph)
        self.factors: dict[Node, frozenset[str]] = {}
        self.tables: set[Node] = set()
        self.sources: dict[Node, frozenset[str]] = {}
        for name, node in graph.parameters.items():
            self.sources[node] = frozenset({name})
        for node in graph.nodes:
            if node.is_learned and node.inputs:
                self._derive(node)

    @property
    def normalized(self) -> set[Node]:
        """Values equal to x / |x|, or LayerNorm's result, without learned factors."""
        return self.norms.normalized

    def _derive(self, node: Node) -> None:
        """Record the sources of a value that depends on parameters only."""
        operands = _operands(node)
        sources: set[str] = set()
        factors: set[str] = set()
        for value in operands:
            factors |= self.factors_of(value)
            of_value = factors if _is_factor(value, node) else sources
            of_value |= self.sources[value]
        self.sources[node] = frozenset(sources)
        self.factors[node] = frozenset(factors)
        if _chooses_rows(node) or (node.moves and self.tables.intersection(operands)):
            self.tables.add(node)

    def factors_of(self, value: Node) -> frozenset[str]:
        """Return the names of the parameters that multiplied rows or columns of a value."""
        return self.factors.get(value, frozenset())

    def is_linear(self, operand: Node) -> bool:
        """Return True if a column factor of `operand` is a column factor of one of its parameters.

        This holds if the parameters are moved, selected, joined, cast, or multiplied by others. It
        does not hold if they are normalized, because a factor of one column then changes all.
        """
        operand = plain(operand)
        if operand.op == "parameter":
            return True
        if operand.op in CHOICES_OF_ROWS:
            return self.is_linear(operand.first)
        if operand.op in ("cat", "stack"):
            return all(value.is_learned and self.is_linear(value) for value in operand.values)
        return operand.op == "mul" and self._is_scaled_matrix(operand)

    def _is_scaled_matrix(self, product: Node) -> bool:
        """Return True for a matrix that smaller, different parameters multiply."""
        learned = [value for value in product.values if value.is_learned]
        matrix = max(learned, key=_size)
        names = self.sources[matrix] | self.factors_of(matrix)
        for factor in product.others(matrix):
            of_factor = self.sources.get(factor, frozenset()) | self.factors_of(factor)
            if _size(factor) == _size(matrix) or of_factor & names:
                return False
        return self.is_linear(matrix)

    def contracted_axis(self, operand: Node, product: Node, name: str) -> int | None:
        """Return the parameter's own axis over which `product` sums, from its strides.

        None if the axis is mixed with others.
        """
        axis: int | None = contraction(product, name, operand)
        while axis is not None and operand.op != "parameter":
            learned = [value for value in operand.values if self.sources.get(value)]
            if not learned:
                return None
            source = _of_equal_size(operand, learned)
            axis = _source_axis(source, operand, axis)
            operand = source
        return axis


def _operands(node: Node) -> list[Node]:
    """Return the learned inputs whose values the result has: of a product no bias, no index."""
    if node.op in CHOICES_OF_ROWS:
        operands = node.arguments(["self"])
    elif node.op in PRODUCTS:
        operands = node.arguments(PRODUCTS[node.op])
    else:
        operands = node.values
    return [value for value in operands if value.is_learned]


def _is_factor(value: Node, product: Node) -> bool:
    """Return True if a product multiplies a larger learned table by `value`."""
    if product.op not in MULTIPLIED:
        return False
    tables = [other for other in product.others(value) if other.is_learned]
    return any(_size(table) > _size(value) for table in tables)


def _chooses_rows(node: Node) -> bool:
    """Return True for rows of a table, selected by position: table[:, :n] or table[positions]."""
    if node.op not in CHOICES_OF_ROWS and node.op != "slice":
        return False
    table, *indices = node.values  # the table is the first input of these operations
    keeps_columns = node.shape[-1:] == table.shape[-1:] != (1,)
    has_rows = max(node.shape[:-1], default=0) > 1
    if not keeps_columns or not has_rows:
        return False
    if node.op == "slice":
        return node.shape != table.shape
    return all(index.is_const for index in indices)


def _size(node: Node) -> int:
    return math.prod(node.shape)


def _of_equal_size(operand: Node, learned: list[Node]) -> Node:
    """Return the input that has as many elements as the result, by default the first."""
    alike = (value for value in learned if _size(value) == _size(operand))
    return next(alike, learned[0])


def _source_axis(source: Node, result: Node, axis: int) -> int | None:
    """Return the one axis of a source that is `axis` of its result."""
    axes = range(len(source.shape))
    found = [each for each in axes if axis in moved(source, result, frozenset({each}))]
    return found[0] if len(found) == 1 else None


def value_at(factor: Node, at: float) -> float | None:
    """Return the factor of a scale vector whose parameter is `at`; None if it is not one number."""
    if factor.op == "parameter":
        return at
    learned = [value for value in factor.values if value.is_learned]
    if len(learned) != 1:
        return None
    base = value_at(learned[0], at)
    return None if base is None else _value_of(factor, learned[0], base)


def _value_of(factor: Node, learned: Node, base: float) -> float | None:
    """Return an operation of a learned value that is `base`; None if it is not one number."""
    if factor.moves and factor.op != "neg":
        return base
    others = {value.op for value in factor.others(learned)}
    return _applied(factor, base) if factor.pointwise and others <= _ONES else None


def _applied(factor: Node, base: float) -> float:
    """Return a pointwise operation of one number and of ones."""
    numbers = {}
    for name, value in factor.inputs:
        number = base if value.is_learned else 1.0
        numbers[name] = torch.tensor(number, dtype=torch.float64)
    return float(factor.call(**numbers, **factor.scalars))
