"""The role of every parameter of any module: what it does in one traced forward pass, never what it is called."""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from lightning_sv.interop.example import example_of
from lightning_sv.interop.flow import Flow, parts
from lightning_sv.interop.ops import ADDENDS, ATTENTION, JOINS, LOOKUPS, MULTIPLIED, NORMS, PRODUCTS, SUMS
from lightning_sv.interop.patterns import Pattern, patterns
from lightning_sv.interop.readers import head_width, is_head, is_router, readings
from lightning_sv.interop.trace import CONST, DATA, PARAM, Node, trace
from lightning_sv.scale import ExponentialScale, OffsetScale, ScaledLinear, ScaleStrategy, ScaleVector

ModelRole = Literal["matrix", "router", "head", "embedding", "bias", "input", "output", "multiplier", "other"]
#: of a parameter with several uses, the first of these
MODEL_ROLES: tuple[ModelRole, ...] = (
    "embedding", "head", "router", "matrix", "output", "input", "multiplier", "bias", "other",
)  # fmt: skip
_WEIGHTS = frozenset({"matrix", "router", "head", "embedding"})


@dataclass(frozen=True)
class ModelParameter:
    """What the trace says of one parameter.

    Attributes:
        name: as in `named_parameters`.
        shape: its sizes.
        role: matrix, router (a matrix whose products choose experts), head (... are the output), embedding (a table
            that is looked up), input (a scale vector that only linear maps read: the paper's Input-Norm), output (any
            other scale vector), multiplier (a factor of something that is not normalized), bias, other.
        redundant: of a scale vector, whether the matrices that follow could take it up, through gates and
            attention's average too; None of the rest.
        decays_to: the factor to which decay pulls a scale vector: 0, or 1 where gamma is 1 + w; None of the rest.
        in_axis: of a matrix, the axis that its product sums over.
        head_width: of a matrix, the width of the heads into which its product is viewed.
        trained: whether it has a gradient.
    """

    name: str
    shape: tuple[int, ...]
    role: ModelRole
    redundant: bool | None = None
    decays_to: float | None = None
    in_axis: int | None = None
    head_width: int | None = None
    trained: bool = True

    @property
    def size(self) -> int:
        """Number of elements."""
        return parts(self.shape)

    def decays(self, policy: str) -> bool:
        """Whether it takes part in weight decay under 'wd', 'iwd', 'owd' or 'nowd'."""
        roles = ScaleStrategy.parse(policy).decayed_roles
        if self.role in _WEIGHTS:
            return True
        return self.role in roles or (self.role == "multiplier" and "output" in roles)


@dataclass(frozen=True)
class Roles:
    """Every parameter of a model, each once, in the order of `named_parameters`."""

    parameters: tuple[ModelParameter, ...]

    def __getitem__(self, name: str) -> ModelParameter:
        """Return the parameter of that name."""
        return next(parameter for parameter in self.parameters if parameter.name == name)

    def decayed(self, policy: str = "iwd") -> list[str]:
        """Names of the trained parameters that decay under `policy`."""
        return [p.name for p in self.parameters if p.trained and p.decays(policy)]

    def undecayed(self, policy: str = "iwd") -> list[str]:
        """Names of the trained parameters that do not."""
        return [p.name for p in self.parameters if p.trained and not p.decays(policy)]

    def patterns(self, kind: Pattern = "regex", policy: str = "iwd", *, decayed: bool = False) -> list[str]:
        """Return patterns that match exactly the names that do not decay under `policy` (that do, with `decayed`).

        Args:
            kind: 'regex' (for re.search and re.match alike) or 'glob' (fnmatch).
            policy: 'wd', 'iwd', 'owd' or 'nowd'.
            decayed: which side.
        """
        wanted, rest = self.undecayed(policy), [p.name for p in self.parameters if p.decays(policy)]
        if decayed:
            wanted, rest = self.decayed(policy), [p.name for p in self.parameters if not p.decays(policy)]
        return patterns(wanted, rest, kind)


def weight_decay_roles(model: nn.Module, example: Any = None, known: Mapping[str, ModelRole] | None = None) -> Roles:
    """Classify every parameter of `model` from one forward pass.

    Args:
        model: any module; on fake tensors (see `fake_model`) nothing is computed and no memory is taken. Build it with
            its head: a final norm that nothing reads is no Input-Norm.
        example: what it is called with, a tensor, a tuple or a dict of keywords. By default 16 token ids for our
            Backbone and for a model of transformers.
        known: roles that you know yourself, by name; they go before the trace's.

    Raises:
        ValueError: the pass failed, an operation is not known to be a linear map or not, or no token reached a
            parameter and its siblings (names that differ in numbers alone) do not agree; each by name.
    """
    args, kwargs = example_of(model, example)
    known = dict(known or {})
    named = dict(model.named_parameters())
    for name, role in known.items():
        if name not in named or role not in MODEL_ROLES:
            what = f"{role!r} is no role; roles: {' '.join(MODEL_ROLES)}" if name in named else "no such parameter"
            raise ValueError(f"known[{name!r}]: {what}.")
    found = _Classifier(model, args, kwargs, known).rows()
    _complete(found, named)
    return Roles(tuple(found[name] for name in named))


def _complete(found: dict[str, ModelParameter], named: Mapping[str, nn.Parameter]) -> None:
    """Give parameters that no token reached the role of their siblings."""
    siblings: dict[str, list[ModelParameter]] = defaultdict(list)
    for row in found.values():
        siblings[family(row.name)].append(row)
    for name, parameter in named.items():
        if name in found:
            continue
        rows = siblings[family(name)]
        if len({(row.role, row.redundant, row.decays_to) for row in rows}) == 1:
            found[name] = replace(rows[0], name=name, shape=tuple(parameter.shape), trained=parameter.requires_grad)
        elif not parameter.requires_grad:
            found[name] = ModelParameter(name, tuple(parameter.shape), "other", trained=False)
        else:
            raise ValueError(
                f"parameter {name} is not used in the traced forward pass, and has no siblings that agree on a role; "
                f"pass an example that reaches it, freeze it (requires_grad=False), or give its role in "
                f"known={{{name!r}: ...}}."
            )


def family(name: str) -> str:
    """Return a name with '*' for its numbers: the same for the parameters of all layers and experts."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


class _Classifier:
    """Collects what each parameter does, at every operation where it meets data."""

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], known: Mapping[str, ModelRole]
    ):
        self.known = known
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
                elif value.kind == PARAM and node.op in PRODUCTS and argument == PRODUCTS[node.op][1]:
                    self._use(value, "matrix")  # W of a product of parameters, as of learned queries

    def _use(self, value: Node, role: ModelRole) -> frozenset[str]:
        """Note a use of all that `value` is made of; what scales a matrix in it is a multiplier."""
        names, factors = self.flow.sources[value], self.flow.factors.get(value, frozenset())
        for name in names:
            self.uses[name].add(role)
        for name in factors:
            self.uses[name].add("multiplier" if role in _WEIGHTS else role)
        if role in _WEIGHTS:
            self.scales_matrix |= factors
        return names

    def _meet(self, node: Node, argument: str, value: Node) -> None:
        """Record what `value`, made of parameters alone, does to data in `node`."""
        op = node.op
        if op in LOOKUPS or (node.kind == DATA and _looked_up(node, argument)):
            self._use(value, "embedding")
        elif op in PRODUCTS and argument in PRODUCTS[op]:
            role: ModelRole = "matrix"
            if is_router(node):
                role = "router"
            elif is_head(node, self.graph.outputs):
                role = "head"
            for name in self._use(value, role):
                self.products[name].append((node, value, argument))
        elif (op in PRODUCTS and argument in ADDENDS) or op in SUMS or (op in NORMS and argument == NORMS[op][2]):
            self._use(value, "bias")
        elif op in NORMS and argument == NORMS[op][1]:
            if node.output == 0:
                self._scale(node, value)
        elif argument in MULTIPLIED.get(op, ()) and parts(value.shape) > 1:
            if any(other in self.flow.normalized for other in node.others(value)):
                self._scale(node, value)
            else:
                self._use(value, "multiplier")
        elif op in ATTENTION:
            self._use(value, "bias" if argument in ("attn_mask", "attn_bias") else "other")
        elif argument in MULTIPLIED.get(op, ()) or op in JOINS or node.pointwise:
            self._use(value, "other")
        elif not all(name in self.own for name in self.flow.sources[value]):
            names = ", ".join(sorted(self.flow.sources[value]))
            raise ValueError(
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
        for node, factor in self.scaled.get(name, ()):
            if name not in self.own:
                ends = list(readings(node, factor, name, through_gates=False))
                linear = bool(ends) and all(end.matrix is not None for end in ends)
                roles.add("input" if linear else "output")
            redundant, decays_to = self._folds(name), _at_zero(factor)
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
        axis, width = self._geometry(name) if role in _WEIGHTS else (None, None)
        parameter = self.named[name]
        return ModelParameter(
            name, tuple(parameter.shape), role, redundant, decays_to, axis, width, parameter.requires_grad
        )

    def _folds(self, name: str) -> bool:
        """Whether matrices take up the vector at every end of its values, and nothing else reads those matrices."""
        by_value = [list(readings(node, factor, name, through_gates=True)) for node, factor in self.scaled[name]]
        ends = [end for ends in by_value for end in ends]
        matrices = {source for end in ends if end.matrix is not None for source in self.flow.sources[end.matrix]}
        products = {product for matrix in matrices for product, _, _ in self.products[matrix]}
        tied = any("embedding" in self.uses[matrix] for matrix in matrices)
        return all(by_value) and not tied and all(e.along_channels for e in ends) and products == {e.node for e in ends}

    def _geometry(self, name: str) -> tuple[int | None, int | None]:
        uses = self.products.get(name, ())
        axes = {self.flow.contracted_axis(operand, product, argument) for product, operand, argument in uses}
        widths = {head_width(product, self.flow) for product, _, _ in uses}
        return (axes.pop() if len(axes) == 1 else None, widths.pop() if len(widths) == 1 else None)


def _looked_up(node: Node, argument: str) -> bool:
    return node.op in ("index", "index_select", "gather", "_unsafe_index") and argument == "self"


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


def _at_zero(factor: Node) -> float | None:
    """Return the factor that a scale vector makes where its parameter is 0; None if that is not a number."""
    import math

    if factor.op == "parameter":
        return 0.0
    learned = [value for _, value in factor.inputs if value.kind == PARAM]
    if len(learned) != 1:
        return None
    base = _at_zero(learned[0])
    if base is None or factor.is_view or factor.op in ("_to_copy", "clone", "_unsafe_view", "detach"):
        return base
    rest = [value for _, value in factor.inputs if value.kind == CONST]
    if rest and rest[0].op not in ("ones", "ones_like", "new_ones"):
        return None
    other = 1.0 if rest else factor.scalars.get("other")
    alpha = float(factor.scalars.get("alpha") or 1)
    if factor.op in ("exp", "neg", "tanh", "sigmoid"):
        return {"exp": math.exp, "neg": lambda x: -x, "tanh": math.tanh, "sigmoid": lambda x: 1 / (1 + math.exp(-x))}[
            factor.op
        ](base)
    if not isinstance(other, (int, float)):
        return None
    if factor.op == "add":
        return base + alpha * other
    if factor.op == "sub":
        return base - alpha * other
    if factor.op == "rsub":
        return other - alpha * base
    return base * other if factor.op == "mul" else base / other if factor.op == "div" else None
