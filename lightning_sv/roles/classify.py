"""What each parameter does to data, at every operation where the two meet."""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_sv.errors import ConfigError
from lightning_sv.roles.flow import Flow
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
from lightning_sv.roles.parameter import MODEL_ROLES, WEIGHTS, ModelParameter, ModelRole
from lightning_sv.roles.readers import UnknownReaderError, head_width, is_head, is_router, readings
from lightning_sv.roles.trace import CONST, PARAM, Node
from lightning_sv.roles.value import value_at
from lightning_sv.scale import ExponentialScale, OffsetScale, ScaledLinear, ScaleVector


class Classifier:
    """Collects what each parameter does, at every operation where it meets data."""

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], known: Mapping[str, ModelRole]
    ):
        self.named = dict(model.named_parameters())
        self.own = dict(_own_roles(model)) | {name: (role, None) for name, role in known.items()}
        self.graph = trace(model, args, kwargs)
        self.flow = Flow(self.graph)
        self.scales_matrix: set[str] = set()
        self.uses: dict[str, set[ModelRole]] = defaultdict(set)
        self.scaled: dict[str, list[tuple[Node, Node]]] = defaultdict(list)  # (scaled value, the factor)
        self.products: dict[str, list[tuple[Node, Node, str]]] = defaultdict(list)  # (product, operand, argument)
        for node in self.graph.nodes:
            for argument, value in node.inputs:
                if value.kind == PARAM and node.kind not in (CONST, PARAM):
                    self._meet(node, argument, value)
                elif value.kind == PARAM and node.op in PRODUCTS:  # of parameters alone, as of learned queries
                    if argument == PRODUCTS[node.op][1]:
                        self._use(value, "matrix")
                    elif argument in ADDENDS and argument not in PRODUCTS[node.op]:
                        self._use(value, "bias")

    def _use(self, value: Node, role: ModelRole) -> frozenset[str]:
        """Note a use of all that `value` is made of; what scales a matrix in it is a multiplier."""
        names, factors = self.flow.sources[value], self.flow.factors.get(value, frozenset())
        for name in names:
            self.uses[name].add(role)
        for name in factors:
            self.uses[name].add("multiplier" if role in WEIGHTS else role)
        if role in WEIGHTS:
            self.scales_matrix |= factors
        return names

    def _meet(self, node: Node, argument: str, value: Node) -> None:
        """Record what `value`, made of parameters alone, does to data in `node`."""
        op = node.op
        if (
            op in LOOKUPS
            or (op in CHOICES_OF_ROWS and argument == "self")
            or (op in SUMS and value in self.flow.tables)
        ):
            self._use(value, "embedding")
        elif op in PRODUCTS and argument in PRODUCTS[op]:
            role: ModelRole = "matrix"
            if is_router(node):
                role = "router"
            elif is_head(node, self.graph.outputs):
                role = "head"
            for name in self._use(value, role):
                self.products[name].append((node, value, argument))
        elif (
            (op in PRODUCTS and argument in ADDENDS)
            or op in SUMS
            or argument in BIASES.get(op, ())
            or (op in NORMS and argument == NORMS[op][2])
        ):
            self._use(value, "bias")
        elif op in NORMS and argument == NORMS[op][1]:
            if node.output == 0:
                self._scale(node, value)
        elif argument in MULTIPLIED.get(op, ()) and math.prod(value.shape) > 1:
            others = node.others(value)
            if any(other in self.flow.normalized for other in others):
                self._scale(node, value)
            elif ends := [end for other in others for end in self.flow.late_norms(node, other)]:
                for end in ends:
                    self._scale(end, value)
            else:
                self._use(value, "multiplier")
        elif op in ATTENTION:
            self._use(value, "bias" if argument in ("attn_mask", "attn_bias") else "other")
        elif argument in MULTIPLIED.get(op, ()) or op in JOINS or node.pointwise:
            self._use(value, "other")
        elif not all(name in self.own for name in self.flow.sources[value]):
            names = ", ".join(sorted(self.flow.sources[value]))
            raise ConfigError(
                f"parameter {names} meets the activations in {op!r}, which is not known; trace a plain model (no "
                f"quantization, no fused kernel), or give its role in `known`."
            )

    def _scale(self, node: Node, value: Node) -> None:
        for name in self.flow.sources[value] | self.flow.factors.get(value, frozenset()):
            self.scaled[name].append((node, value))

    def rows(self) -> dict[str, ModelParameter]:
        """Return the parameters that were used."""
        return {name: row for name in self.named if (row := self._row(name)) is not None}

    def _row(self, name: str) -> ModelParameter | None:
        redundant: bool | None = None
        decays_to: float | None = None
        roles = set(self.uses.get(name, ()))
        scaled = self.scaled.get(name, ())
        if scaled and name not in self.own:
            ends = list(readings(scaled, name, through_gates=False))
            roles.add("input" if ends and all(end.matrix is not None for end in ends) else "output")
        for _, factor in scaled:
            decays_to = value_at(factor, 0.0)
        if name in self.scaled:
            redundant = self._folds(name)
        if name in self.scales_matrix:
            redundant = redundant is not False
        if name in self.own:
            role, to = self.own[name]
            decays_to = decays_to if to is None else to
        elif roles:
            role = next(role for role in MODEL_ROLES if role in roles)
        else:
            return None
        if role not in ("input", "output"):
            redundant = decays_to = None
        axis, width = self._geometry(name) if role in WEIGHTS else (None, None)
        parameter = self.named[name]
        return ModelParameter(
            name, tuple(parameter.shape), role, redundant, decays_to, axis, width, parameter.requires_grad
        )

    def _folds(self, name: str) -> bool:
        """Whether matrices take up the vector at every end of its values, and nothing else reads those matrices."""
        try:
            ends = list(readings(self.scaled[name], name, through_gates=True))
        except UnknownReaderError:  # behind a gate, where roles do not look
            return False
        operands = [end.matrix for end in ends if end.matrix is not None]
        if not all(self.flow.is_linear(operand) for operand in operands):
            return False
        matrices = {source for operand in operands for source in self.flow.sources[operand]}
        products = {product for matrix in matrices for product, _, _ in self.products[matrix]}
        tied = any("embedding" in self.uses[matrix] for matrix in matrices)
        return bool(ends) and not tied and all(e.along_channels for e in ends) and products == {e.node for e in ends}

    def _geometry(self, name: str) -> tuple[int | None, int | None]:
        uses = self.products.get(name, ())
        axes = {self.flow.contracted_axis(operand, product, argument) for product, operand, argument in uses}
        widths = {head_width(product, self.flow) for product, _, _ in uses}
        return (axes.pop() if len(axes) == 1 else None, widths.pop() if len(widths) == 1 else None)


def _own_roles(model: nn.Module) -> list[tuple[str, tuple[ModelRole, float | None]]]:
    """Roles of our own modules' parameters: the modules say them."""
    found: list[tuple[str, tuple[ModelRole, float | None]]] = []
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, ScaleVector):
            to = 1.0 if isinstance(module, (OffsetScale, ExponentialScale)) else 0.0
            found += [(prefix + name, (module.role, to)) for name, _ in module.named_parameters()]
        elif isinstance(module, ScaledLinear):
            found.append((f"{prefix}weight", (module.role, None)))
    return found
