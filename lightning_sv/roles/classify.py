"""Classification of parameters: a table of rules for every operation that reads a function of parameters."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import lightning_sv.roles.ops as ops
from lightning_sv.roles.consumers import is_head, is_router
from lightning_sv.roles.dataflow import Dataflow, plain, stems
from lightning_sv.roles.trace import CONST, PARAM, Node
from lightning_sv.roles.types import ModelRole


@dataclass
class Use:
    """An argument of an operation that depends on parameters only."""

    node: Node  #: result of the operation
    argument: str  #: name of the argument
    value: Node  #: node of the argument
    flow: Dataflow

    @property
    def part(self) -> str:
        """Part of the value in the operation: 'operand' of a product, 'factor', 'addend', 'norm weight' or ''."""
        op, argument = self.node.op, self.argument
        if argument in ops.PRODUCTS.get(op, ()):
            return "operand"
        if op in ops.NORMS and argument in ops.NORMS[op][1:]:
            return "norm weight" if argument == ops.NORMS[op][1] else "addend"
        if op in ops.SUMS or (op in ops.PRODUCTS and argument in ops.ADDENDS):
            return "addend"
        return "factor" if argument in ops.MULTIPLIED.get(op, ()) else ""

    @cached_property
    def scaled(self) -> list[Node]:
        """Scaled outputs of norms, if the value is a scale vector; otherwise empty."""
        if self.part == "norm weight":
            return [] if self.node.output else [self.node]  # other outputs are statistics
        others = self.node.others(self.value)
        if self.part != "factor" or math.prod(self.value.shape) == 1:
            return []
        if any(other in self.flow.normalized for other in others):
            return [self.node]
        return [end for other in others for end in self.flow.late_norms(self.node, other)]

    @cached_property
    def scaled_by_sum(self) -> list[Node]:
        """Outputs of norms that are multiplied by the sum of the value and data, as in (gamma + d(x)) * xhat.

        A bias of a linear map, and one that is added to the output of a norm, is no part of a scale vector.
        """
        if self.node.op not in ops.SUMS or math.prod(self.value.shape) == 1:
            return []
        for other in self.node.others(self.value):
            if plain(other).op in ops.PRODUCTS or stems(other) & self.flow.normalized:
                return []
        return self.flow.factors_of_norms(self.node)

    @property
    def scaled_values(self) -> list[tuple[Node, Node]]:
        """Scaled outputs of norms, each with its factor: the value, or the sum of the value and data."""
        return [(end, self.value) for end in self.scaled] + [(end, self.node) for end in self.scaled_by_sum]


class Rule(NamedTuple):
    """One row of `RULES`."""

    name: str
    #: 'scale vector' is resolved later by the consumers of the scaled values; None if this use determines no role
    role: ModelRole | Literal["scale vector"] | None
    applies: Callable[[Use], bool]


#: the first rule that applies to a use decides; docs/roles-architecture.md gives the reason for each
RULES = (
    Rule(
        "learned queries' matrix",
        "matrix",
        lambda use: use.node.kind == PARAM and use.part == "operand" and use.argument == ops.PRODUCTS[use.node.op][1],
    ),
    Rule(
        "learned queries' bias",
        "bias",
        lambda use: use.node.kind == PARAM and use.node.op in ops.PRODUCTS and use.part == "addend",
    ),
    Rule("parameters alone", None, lambda use: use.node.kind == PARAM),
    Rule("lookup", "embedding", lambda use: use.node.op in ops.LOOKUPS),
    Rule("chosen rows", "embedding", lambda use: use.node.op in ops.CHOICES_OF_ROWS and use.argument == "self"),
    Rule("added table", "embedding", lambda use: use.node.op in ops.SUMS and use.value in use.flow.tables),
    Rule("router", "router", lambda use: use.part == "operand" and is_router(use.node)),
    Rule("head", "head", lambda use: use.part == "operand" and is_head(use.node, use.flow.graph.outputs)),
    Rule("matrix", "matrix", lambda use: use.part == "operand"),
    Rule("summand of a scale vector", "scale vector", lambda use: bool(use.scaled_by_sum)),
    Rule("bias", "bias", lambda use: use.part == "addend"),
    Rule("scale vector", "scale vector", lambda use: bool(use.scaled)),
    Rule("norm's statistics", None, lambda use: use.part == "norm weight"),
    Rule("factor", "multiplier", lambda use: use.part == "factor" and math.prod(use.value.shape) > 1),
    Rule("attention's mask", "bias", lambda use: use.node.op in ops.ATTENTION and use.argument in ops.MASKS),
    Rule("argument of attention", "other", lambda use: use.node.op in ops.ATTENTION),
    Rule("single factor", "other", lambda use: use.part == "factor"),
    Rule("joined", "other", lambda use: use.node.op in ops.JOINS),
    Rule("elementwise", "other", lambda use: use.node.pointwise),
)


def first_rule(use: Use) -> Rule | None:
    """Return the rule that decides a use; None for an unknown operation."""
    return next((rule for rule in RULES if rule.applies(use)), None)


def uses_of_parameters(flow: Dataflow) -> Iterator[Use]:
    """Yield every argument that depends on parameters only, in the order of the pass."""
    for node in flow.graph.nodes:
        if node.kind != CONST:
            yield from (Use(node, argument, value, flow) for argument, value in node.inputs if value.kind == PARAM)
