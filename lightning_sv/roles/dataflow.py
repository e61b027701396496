"""Dataflow of a traced pass: the parameters in each value, and normalized values.

A value made of parameters alone has sources, the parameters that its entries come from, and
factors, smaller parameters that multiplied rows or columns of these:

    W (8, 4)                       sources W
    W.T * g, with g (8,)           sources W, factors g
    cat(W, V)[ids]                 sources W and V
"""

from operator import attrgetter

import torch

from lightning_sv.roles.axes import moved
from lightning_sv.roles.graph import Graph, Node, Use, plain
from lightning_sv.roles.norms import Norms
from lightning_sv.roles.ops import CHOICES_OF_ROWS, MULTIPLIED, NORMS, PRODUCTS

_ONES = {"ones", "ones_like", "new_ones"}
_JOINS = {"cat", "stack"}
_NONE = frozenset[str]()
_SIZE = attrgetter("size")


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

    def _derive(self, node: Node) -> None:
        """Record the sources of a value that depends on parameters only."""
        sources: set[str] = set()
        factors: set[str] = set()
        operands = _operands(node)
        for value in operands:
            factors |= self.factors_of(value)
            if _is_factor(value, node):
                factors |= self.sources[value]
            else:
                sources |= self.sources[value]
        self.sources[node] = frozenset(sources)
        self.factors[node] = frozenset(factors)

        moves_table = node.moves and node.first in self.tables
        if moves_table or _chooses_rows(node):
            self.tables.add(node)

    def factors_of(self, value: Node) -> frozenset[str]:
        """Return the names of the parameters that multiplied rows or columns of a value."""
        return self.factors.get(value, _NONE)

    def _names_in(self, value: Node) -> frozenset[str]:
        """Return the sources and factors of a value."""
        return self.sources.get(value, _NONE) | self.factors_of(value)

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
        if operand.op in _JOINS:
            return all(map(self.is_linear, operand.values))
        return operand.op == "mul" and self._is_scaled_matrix(operand)

    def _is_scaled_matrix(self, product: Node) -> bool:
        """Return True for a matrix that smaller, different parameters multiply."""
        if not product.is_learned:
            return False
        matrix = max(product.learned_values, key=_SIZE)
        names = self._names_in(matrix)
        for factor in product.others(matrix):
            if factor.size == matrix.size or self._names_in(factor) & names:
                return False
        return self.is_linear(matrix)

    def in_axis(self, use: Use) -> int | None:
        """Return the parameter's own axis over which a product of it sums, from its strides.

        None if the axis is mixed with others.
        """
        axes = frozenset({use.contracted_axis})
        operand = use.value
        while operand.op != "parameter":
            source = _main_source(operand)
            axes = _source_axes(source, operand, axes)
            if len(axes) != 1:
                return None
            operand = source
        return min(axes)


def _operands(node: Node) -> list[Node]:
    """Return the learned inputs whose values the result has: no index, no bias, no scale vector."""
    operands = node.values
    if node.op in PRODUCTS:
        operands = node.arguments(PRODUCTS[node.op])
    elif node.op in CHOICES_OF_ROWS or node.op in NORMS:
        operands = [node.first]
    return [value for value in operands if value.is_learned]


def _is_factor(value: Node, product: Node) -> bool:
    """Return True if a product multiplies a larger learned table by `value`."""
    if product.op not in MULTIPLIED:
        return False
    largest = max(product.learned_values, key=_SIZE)
    return largest.size > value.size


def _chooses_rows(node: Node) -> bool:
    """Return True for rows of a table, selected by position: table[:, :n] or table[positions]."""
    table, *indices = node.values  # the table is the first input of these operations
    if node.op == "slice":
        is_choice = node.shape != table.shape
    elif node.op in CHOICES_OF_ROWS:
        is_choice = all(index.is_const for index in indices)
    else:
        return False
    return is_choice and _has_rows_of(node, table)


def _has_rows_of(value: Node, table: Node) -> bool:
    """Return True for a value of several rows, each with all columns of a table."""
    columns = table.shape[-1:]
    if columns == (1,) or value.shape[-1:] != columns:
        return False
    return max(value.shape[:-1], default=0) > 1


def _main_source(operand: Node) -> Node:
    """Return the learned input that has as many elements as the result, by default the first."""
    learned = operand.learned_values
    for value in learned:
        if value.size == operand.size:
            return value
    return learned[0]


def _source_axes(source: Node, result: Node, axes: frozenset[int]) -> frozenset[int]:
    """Return the axes of a source that become one of these axes of its result."""
    found = set()
    for axis in range(len(source.shape)):
        if axes & moved(source, result, frozenset({axis})):
            found.add(axis)
    return frozenset(found)


def value_at(factor: Node, at: float) -> float | None:
    """Return the factor of a scale vector whose parameter is `at`; None if it is not one number."""
    if factor.op == "parameter":
        return at
    learned = factor.learned_values
    if len(learned) != 1:
        return None

    keeps_value = factor.moves and factor.op != "neg"
    others = {value.op for value in factor.outside(learned)}
    is_of_one_number = factor.pointwise and others <= _ONES
    if not keeps_value and not is_of_one_number:
        return None

    value = value_at(learned[0], at)
    if value is None or keeps_value:
        return value
    return _applied(factor, value)


def _applied(factor: Node, base: float) -> float:
    """Return a pointwise operation of one number and of ones."""
    numbers = {}
    for use in factor.inputs:
        number = 1.0
        if use.value.is_learned:
            number = base
        numbers[use.argument] = torch.tensor(number, dtype=torch.float64)
    return float(factor.call(**numbers, **factor.scalars))
