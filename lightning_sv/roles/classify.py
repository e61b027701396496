"""Classification of parameters: a table of rules for every operation that reads a function of parameters."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from torch import nn

from lightning_sv.errors import ConfigError
from lightning_sv.roles.consumers import Consumer, UnknownConsumerError, consumers, head_width, is_head, is_router
from lightning_sv.roles.dataflow import Dataflow, value_at
from lightning_sv.roles.forward import trace
from lightning_sv.roles.ops import (
    ADDENDS,
    ATTENTION,
    BIASES,
    CHOICES_OF_ROWS,
    JOINS,
    LOOKUPS,
    MULTIPLIED,
    NORMS,
    PRODUCTS,
    SUMS,
)
from lightning_sv.roles.trace import CONST, PARAM, Node
from lightning_sv.roles.types import MODEL_ROLES, WEIGHTS, ModelParameter, ModelRole
from lightning_sv.scale import ExponentialScale, OffsetScale, ScaledLinear, ScaleVector


@dataclass
class Use:
    """An argument of an operation that depends on parameters only.

    Attributes:
        node: result of the operation
        argument: name of the argument
        value: node of the argument
        flow: dataflow of the pass
    """

    node: Node
    argument: str
    value: Node
    flow: Dataflow

    @property
    def part(self) -> str:
        """Part of the value in the operation: 'operand' of a product, 'factor', 'addend', 'norm weight' or ''."""
        op, argument = self.node.op, self.argument
        if argument in PRODUCTS.get(op, ()):
            return "operand"
        if op in NORMS and argument in NORMS[op][1:]:
            return "norm weight" if argument == NORMS[op][1] else "addend"
        if op in SUMS or argument in BIASES.get(op, ()) or (op in PRODUCTS and argument in ADDENDS):
            return "addend"
        return "factor" if argument in MULTIPLIED.get(op, ()) else ""

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


class Rule(NamedTuple):
    """One row of `RULES`.

    Attributes:
        name: name of the rule
        role: role of the parameters; 'scale vector' is resolved later by the consumers of the scaled values; None if
            this use determines no role
        applies: predicate of the uses
        why: one-line explanation
    """

    name: str
    role: ModelRole | Literal["scale vector"] | None
    applies: Callable[[Use], bool]
    why: str


#: the first rule that applies to a use decides
RULES = (
    Rule("learned queries' matrix", "matrix",
         lambda use: use.node.kind == PARAM and use.node.op in PRODUCTS and use.argument == PRODUCTS[use.node.op][1],
         "not combined with data yet, but the queries pass through this matrix first"),
    Rule("learned queries' bias", "bias",
         lambda use: use.node.kind == PARAM and use.node.op in PRODUCTS and use.part == "addend",
         "the product of learned queries and a matrix adds it"),
    Rule("parameters alone", None, lambda use: use.node.kind == PARAM,
         "a function of parameters: its result is classified where it is combined with data"),
    Rule("lookup", "embedding", lambda use: use.node.op in LOOKUPS,
         "rows of a table are selected by index"),
    Rule("chosen rows", "embedding", lambda use: use.node.op in CHOICES_OF_ROWS and use.argument == "self",
         "table[ids] is equivalent to a lookup"),
    Rule("added table", "embedding", lambda use: use.node.op in SUMS and use.value in use.flow.tables,
         "rows of a table, selected by position, such as learned positions"),
    Rule("router", "router", lambda use: use.part == "operand" and is_router(use.node),
         "a matrix whose product is ranked by top-k, sort or argmax selects experts"),
    Rule("head", "head", lambda use: use.part == "operand" and is_head(use.node, use.flow.graph.outputs),
         "a matrix whose product is only the output"),
    Rule("matrix", "matrix", lambda use: use.part == "operand",
         "any other linear map of data"),
    Rule("bias", "bias", lambda use: use.part == "addend",
         "it is added by a sum, a product, a norm or a recurrent cell"),
    Rule("scale vector", "scale vector", lambda use: bool(use.scaled),
         "it multiplies the output of a norm, or one of the norm's two factors before the other"),
    Rule("norm's statistics", None, lambda use: use.part == "norm weight",
         "the other outputs of the norm's operation do not depend on the vector"),
    Rule("factor", "multiplier", lambda use: use.part == "factor" and math.prod(use.value.shape) > 1,
         "it multiplies unnormalized values, like LayerScale"),
    Rule("attention's mask", "bias",
         lambda use: use.node.op in ATTENTION and use.argument in ("attn_mask", "attn_bias"),
         "it is added to the scores"),
    Rule("argument of attention", "other", lambda use: use.node.op in ATTENTION,
         "a learned query, key or value without a matrix"),
    Rule("single factor", "other", lambda use: use.part == "factor",
         "a single number for all channels is not a scale vector"),
    Rule("joined", "other", lambda use: use.node.op in JOINS,
         "it is concatenated with data, like a class token"),
    Rule("elementwise", "other", lambda use: use.node.pointwise,
         "a function of it and data that is neither their product nor their sum"),
)  # fmt: skip


def first_rule(use: Use) -> Rule | None:
    """Return the rule that decides a use; None for an unknown operation."""
    return next((rule for rule in RULES if rule.applies(use)), None)


def uses_of_parameters(flow: Dataflow) -> Iterator[Use]:
    """Yield every argument that depends on parameters only, in the order of the pass."""
    for node in flow.graph.nodes:
        if node.kind != CONST:
            yield from (Use(node, argument, value, flow) for argument, value in node.inputs if value.kind == PARAM)


class Classifier:
    """Uses of each parameter of a model in one traced pass.

    Args:
        model: any module
        args: positional arguments of the pass
        kwargs: keyword arguments of the pass
        known: roles by name, which take precedence over the trace

    Attributes:
        uses: parameter -> one or more roles
        scaled: scale vector -> (scaled value, the factor)
        products: matrix -> (product, operand, name of its argument)

    Raises:
        ConfigError: a parameter without a known role is combined with data in an unknown operation
    """

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], known: Mapping[str, ModelRole]
    ):
        self.named = dict(model.named_parameters())
        self.graph = trace(model, args, kwargs)
        self.flow = Dataflow(self.graph)
        self.uses: dict[str, set[ModelRole]] = defaultdict(set)
        self.scaled: dict[str, list[tuple[Node, Node]]] = defaultdict(list)
        self.products: dict[str, list[tuple[Node, Node, str]]] = defaultdict(list)
        self._declared = _declared_roles(model) | {name: (role, None) for name, role in known.items()}
        self._scales_matrix: set[str] = set()
        self._consumers: dict[str, list[Consumer]] = {}
        for use in uses_of_parameters(self.flow):
            self._note(use)

    def _note(self, use: Use) -> None:
        names, factors = self.flow.sources[use.value], self.flow.factors.get(use.value, frozenset())
        rule = first_rule(use)
        if rule is None:
            if not all(name in self._declared for name in names):
                raise ConfigError(
                    f"parameter {', '.join(sorted(names))} is combined with activations in {use.node.op!r}, an unknown "
                    "operation; trace a plain model (no quantization, no fused kernel), or give its role in `known`."
                )
        elif rule.role == "scale vector":
            for name in names | factors:
                self.scaled[name] += [(scaled, use.value) for scaled in use.scaled]
        elif rule.role is not None:
            for name in names:
                self.uses[name].add(rule.role)
                if use.part == "operand" and use.node.kind != PARAM:
                    self.products[name].append((use.node, use.value, use.argument))
            for name in factors:  # a factor of a matrix is a multiplier
                self.uses[name].add("multiplier" if rule.role in WEIGHTS else rule.role)
            if rule.role in WEIGHTS:
                self._scales_matrix |= factors

    def parameters(self) -> dict[str, ModelParameter]:
        """Return the parameters that are used in the pass."""
        return {name: row for name in self.named if (row := self._parameter(name)) is not None}

    def consumers_of(self, name: str) -> list[Consumer]:
        """Return the consumers of the values that a scale vector scales, without passing gates.

        Raises:
            UnknownConsumerError: it is unknown whether an operation is linear
        """
        if name not in self._consumers:
            self._consumers[name] = list(consumers(self.scaled.get(name, ()), name, through_gates=False))
        return self._consumers[name]

    def _parameter(self, name: str) -> ModelParameter | None:
        roles, scaled = set(self.uses.get(name, ())), self.scaled.get(name)
        decays_to = value_at(scaled[-1][1], 0.0) if scaled else None
        if name in self._declared:
            role, declared = self._declared[name]
            decays_to = decays_to if declared is None else declared
        else:
            if scaled:  # the paper's Input-Norm: only matrices read it
                ends = self.consumers_of(name)
                roles.add("input" if ends and all(end.matrix is not None for end in ends) else "output")
            if not roles:
                return None
            role = next(role for role in MODEL_ROLES if role in roles)
        redundant: bool | None = None
        if role not in ("input", "output"):
            decays_to = None
        elif scaled or name in self._scales_matrix:
            redundant = not scaled or self._folds(name)
        axis, width = self._geometry(name) if role in WEIGHTS else (None, None)
        parameter = self.named[name]
        return ModelParameter(
            name, tuple(parameter.shape), role, redundant, decays_to, axis, width, parameter.requires_grad
        )

    def _folds(self, name: str) -> bool:
        """Return True if matrices can absorb the vector at every end of its values, and nothing else reads them."""
        try:
            ends = list(consumers(self.scaled[name], name, through_gates=True))
        except UnknownConsumerError:  # behind a gate, which roles do not pass
            return False
        operands = [end.matrix for end in ends if end.matrix is not None]
        if not all(self.flow.is_linear(operand) for operand in operands):
            return False
        matrices = {source for operand in operands for source in self.flow.sources[operand]}
        products = {product for matrix in matrices for product, _, _ in self.products[matrix]}
        tied = any("embedding" in self.uses[matrix] for matrix in matrices)
        return bool(ends) and not tied and all(e.along_channels for e in ends) and products == {e.node for e in ends}

    def _geometry(self, name: str) -> tuple[int | None, int | None]:
        """Return the axis of a matrix's contractions and the width of its heads; None if ambiguous."""
        uses = self.products.get(name, ())
        axes = {self.flow.contracted_axis(operand, product, argument) for product, operand, argument in uses}
        widths = {head_width(product) for product, _, _ in uses}
        return (axes.pop() if len(axes) == 1 else None, widths.pop() if len(widths) == 1 else None)


def _declared_roles(model: nn.Module) -> dict[str, tuple[ModelRole, float | None]]:
    """Return the declarations of our own modules: parameter -> (role, target of the decay)."""
    declared: dict[str, tuple[ModelRole, float | None]] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, ScaleVector):
            to = 1.0 if isinstance(module, (OffsetScale, ExponentialScale)) else 0.0
            declared |= {prefix + name: (module.role, to) for name, _ in module.named_parameters()}
        elif isinstance(module, ScaledLinear):
            declared[f"{prefix}weight"] = (module.role, None)
    return declared
