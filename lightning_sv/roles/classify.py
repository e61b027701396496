"""Classification of parameters: rules for every operation that reads a function of parameters.

`LearnedUse` answers questions about one argument of one operation. `RULES` asks them in the order
in which they matter; the first that applies gives the role:

    mm(x, W)        W is an operand: router? head? else a matrix
    xhat * gamma    gamma is a factor, and xhat is normalized: a scale vector
    h * gamma       the same, but h is not normalized: a multiplier
    h + b           b is an addend: a bias
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import lightning_sv.roles.ops as ops
from lightning_sv.roles.dataflow import Dataflow
from lightning_sv.roles.destinations import is_head, is_router
from lightning_sv.roles.graph import Node, Use, plain
from lightning_sv.roles.types import ModelRole


@dataclass(eq=False)
class LearnedUse(Use):
    """A use of a value that depends on parameters only."""

    flow: Dataflow

    @property
    def names(self) -> frozenset[str]:
        """Parameters that the value is made of."""
        return self.flow.sources[self.value]

    @property
    def factors(self) -> frozenset[str]:
        """Parameters that multiplied them."""
        return self.flow.factors_of(self.value)

    @property
    def is_learned_matrix(self) -> bool:
        """True for a matrix that multiplies learned queries."""
        if not self.node.is_learned or self.node.op not in ops.PRODUCTS:
            return False
        _, matrix = ops.PRODUCTS[self.node.op]
        if self.argument != matrix:
            return False
        return plain(self.value).op == "parameter"

    @property
    def is_learned_scale(self) -> bool:
        """True for the scale vector of a norm of learned queries."""
        return self.node.is_learned and self.is_norm_weight

    @property
    def is_learned_bias(self) -> bool:
        """True for the bias of a product, or of a norm, of learned queries."""
        return self.node.is_learned and self.is_addend and self.node.op not in ops.SUMS

    @property
    def is_norm_weight(self) -> bool:
        """True for the scale vector of a norm's operation."""
        return self.argument == ops.NORMS.get(self.node.op, ops.NO_NORM).weight

    @property
    def is_addend(self) -> bool:
        """True for what a sum, a product or a norm adds."""
        if self.node.op in ops.SUMS:
            return True
        if self.node.op in ops.PRODUCTS:
            return self.argument in ops.ADDENDS and not self.is_operand
        return self.argument == ops.NORMS.get(self.node.op, ops.NO_NORM).bias

    @property
    def is_factor(self) -> bool:
        """True for what an operation multiplies."""
        return self.argument in ops.MULTIPLIED.get(self.node.op, ())

    @property
    def has_channels(self) -> bool:
        """True if the value has more than one number."""
        return self.value.size > 1

    @property
    def chooses_rows(self) -> bool:
        """True for a table of which the operation selects rows."""
        return self.node.op in ops.CHOICES_OF_ROWS and self.argument == "self"

    @property
    def adds_table(self) -> bool:
        """True for rows of a table, selected by position, in a sum."""
        return self.node.op in ops.SUMS and self.value in self.flow.tables

    @property
    def is_router(self) -> bool:
        """True for a matrix that selects experts."""
        return self.is_operand and is_router(self.node)

    @property
    def is_head(self) -> bool:
        """True for a matrix whose products are the output."""
        return self.is_operand and is_head(self.node, self.flow.graph.outputs)

    @cached_property
    def scaled(self) -> list[Node]:
        """Scaled outputs of norms, if the value is a scale vector; otherwise empty."""
        if self.is_norm_weight and self.node.output == 0:
            return [self.node]
        if not self.is_factor or not self.has_channels:
            return []

        norms = self.flow.norms
        others = self.node.others(self.value)
        if norms.normalized.intersection(others):
            return [self.node]
        scaled = []
        for other in others:
            scaled += norms.late_norms(self.node, other)
        return scaled

    @property
    def is_mask(self) -> bool:
        """True for what attention adds to the scores."""
        return self.is_of_attention and self.argument in ops.MASKS

    @property
    def is_of_attention(self) -> bool:
        """True for an argument of attention."""
        return self.node.op in ops.ATTENTION


class Rule(NamedTuple):
    """One row of `RULES`.

    Attributes:
        name: name of the row in docs/architecture.md
        role: 'scale vector' is resolved later by the consumers of the scaled values; None if this
            use determines no role
        applies: question to a use
    """

    name: str
    role: ModelRole | Literal["scale vector"] | None
    applies: Callable[[LearnedUse], bool]


#: the first rule that applies to a use decides; docs/architecture.md gives the reasons
RULES = (
    Rule("learned queries' matrix", "matrix", lambda use: use.is_learned_matrix),
    Rule("learned queries' scale vector", "multiplier", lambda use: use.is_learned_scale),
    Rule("learned queries' bias", "bias", lambda use: use.is_learned_bias),
    Rule("parameters alone", None, lambda use: use.node.is_learned),
    Rule("lookup", "embedding", lambda use: use.node.op in ops.LOOKUPS),
    Rule("chosen rows", "embedding", lambda use: use.chooses_rows),
    Rule("added table", "embedding", lambda use: use.adds_table),
    Rule("router", "router", lambda use: use.is_router),
    Rule("head", "head", lambda use: use.is_head),
    Rule("matrix", "matrix", lambda use: use.is_operand),
    Rule("bias", "bias", lambda use: use.is_addend),
    Rule("scale vector", "scale vector", lambda use: bool(use.scaled)),
    Rule("norm's statistics", None, lambda use: use.is_norm_weight),
    Rule("factor", "multiplier", lambda use: use.is_factor and use.has_channels),
    Rule("attention's mask", "bias", lambda use: use.is_mask),
    Rule("argument of attention", "other", lambda use: use.is_of_attention),
    Rule("single factor", "other", lambda use: use.is_factor),
    Rule("joined", "other", lambda use: use.node.op in ops.JOINS),
    Rule("elementwise", "other", lambda use: use.node.pointwise),
)


def first_rule(use: LearnedUse) -> Rule | None:
    """Return the rule that decides a use; None for an unknown operation."""
    return next((rule for rule in RULES if rule.applies(use)), None)


def uses_of_parameters(flow: Dataflow) -> Iterator[LearnedUse]:
    """Yield every argument that depends on parameters only, in the order of the pass."""
    for node in flow.graph.nodes:
        if node.is_const:
            continue
        for use in node.inputs:
            if use.value.is_learned:
                yield LearnedUse(node, use.argument, use.value, flow)
