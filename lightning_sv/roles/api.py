"""Role of every parameter of any module, from one traced forward pass and not from its name."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake, unset_fake_temporarily
from torch.func import functional_call

from lightning_sv.errors import ConfigError, expect
from lightning_sv.roles.classify import Use, first_rule, uses_of_parameters
from lightning_sv.roles.consumers import Consumer, UnknownConsumerError, consumers, head_width
from lightning_sv.roles.dataflow import Dataflow, value_at
from lightning_sv.roles.example_inputs import example_of
from lightning_sv.roles.result import Roles
from lightning_sv.roles.table import family
from lightning_sv.roles.trace import PARAM, Node, trace
from lightning_sv.roles.types import MODEL_ROLES, WEIGHTS, ModelParameter, ModelRole
from lightning_sv.scale import ScaledLinear, ScaleVector


def weight_decay_roles(model: nn.Module, example: Any = None, known: Mapping[str, ModelRole] | None = None) -> Roles:
    """Classify every parameter of `model` from one forward pass.

    Args:
        model: any module; on fake tensors (see `fake_model`) nothing is computed and no memory is used. Build it with
            its head: a final norm without a consumer is not an Input-Norm
        example: inputs of the model: a tensor, a tuple or a dict of keywords. By default 16 token ids for our
            Backbone and for transformers models
        known: roles by parameter name, which take precedence over the trace

    Raises:
        ConfigError: the pass failed, it is unknown whether an operation is linear, or no token reached a parameter and
            its siblings (names that differ only in numbers) disagree; the message names it
    """
    return TracedModel(model, example, known, every=True).roles


class TracedModel:
    """Roles of a model, with the uses of its parameters in one traced pass.

    Args:
        model: any module
        example: as in `weight_decay_roles`
        known: roles by name, which take precedence over the trace
        every: if False, vectors that the pass does not use, such as mask tokens, have the role 'other'

    Attributes:
        inputs: (args, kwargs) of the pass
        uses: parameter -> one or more roles
        scaled: scale vector -> (scaled value, the factor)
        products: matrix -> (product, operand, name of its argument)
        roles: the result

    Raises:
        ConfigError: as `weight_decay_roles`
    """

    def __init__(
        self,
        model: nn.Module,
        example: Any = None,
        known: Mapping[str, ModelRole] | None = None,
        *,
        every: bool = False,
    ):
        expect(known is None or isinstance(known, Mapping), "known", known, "a dict of roles by parameter name.")
        self.inputs, self.known, self.named = example_of(model, example), known or {}, dict(model.named_parameters())
        for name, role in self.known.items():
            wanted = f"a parameter of the model and one of: {' '.join(MODEL_ROLES)}."
            expect(name in self.named and role in MODEL_ROLES, f"known[{name!r}]", repr(role), wanted)
        self.model, self.flow = model, Dataflow(trace(model, *self.inputs))
        self.uses: dict[str, set[ModelRole]] = defaultdict(set)
        self.scaled: dict[str, list[tuple[Node, Node]]] = defaultdict(list)
        self.products: dict[str, list[tuple[Node, Node, str]]] = defaultdict(list)
        self._declared = _declared_roles(model) | {name: (role, None) for name, role in self.known.items()}
        self._scales_matrix: set[str] = set()
        for use in uses_of_parameters(self.flow):
            self._note(use)
        found = {name: row for name in self.named if (row := self._parameter(name)) is not None}
        self.roles = Roles(self._completed(found, every=every))

    def _note(self, use: Use) -> None:
        """Record the role that one use gives to the parameters in its value."""
        rule = first_rule(use)
        if rule is None:
            self._check_declared(use)
        elif rule.role == "scale vector":
            for name in self._names(use) | self._factors(use):
                self.scaled[name] += use.scaled_values
        elif rule.role is not None:
            self._note_role(use, rule.role)

    def _names(self, use: Use) -> frozenset[str]:
        return self.flow.sources[use.value]

    def _factors(self, use: Use) -> frozenset[str]:
        return self.flow.factors.get(use.value, frozenset())

    def _check_declared(self, use: Use) -> None:
        """Refuse an unknown operation, unless the roles of its parameters are given."""
        names = self._names(use)
        if not names <= self._declared.keys():
            found = f"{', '.join(sorted(names))} is combined with activations in {use.node.op!r}"
            hint = "trace a plain model (no quantization, no fused kernel), or give its role in `known`."
            raise ConfigError(f"parameter {found}, an unknown operation; {hint}")

    def _note_role(self, use: Use, role: ModelRole) -> None:
        is_product = use.part == "operand" and use.node.kind != PARAM
        for name in self._names(use):
            self.uses[name].add(role)
            if is_product:
                self.products[name].append((use.node, use.value, use.argument))
        factors = self._factors(use)
        of_matrix = role in WEIGHTS
        for name in factors:
            self.uses[name].add("multiplier" if of_matrix else role)
        if of_matrix:
            self._scales_matrix |= factors

    def consumers_of(self, name: str) -> list[Consumer]:
        """Return the consumers of the values that a scale vector scales, without passing gates.

        Raises:
            UnknownConsumerError: it is unknown whether an operation is linear
        """
        return list(consumers(self.scaled.get(name, ()), name, through_gates=False))

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
        if any(factor.kind != PARAM for _, factor in self.scaled[name]):
            return False
        try:
            ends = list(consumers(self.scaled[name], name, through_gates=True, outputs=self.flow.graph.outputs))
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

    def _completed(self, found: Mapping[str, ModelParameter], *, every: bool) -> tuple[ModelParameter, ...]:
        """Return all parameters; those without tokens get the role of their siblings."""
        siblings: dict[str, list[ModelParameter]] = defaultdict(list)
        for row in found.values():
            siblings[family(row.name)].append(row)
        rows = []
        for name, parameter in self.named.items():
            shape, like = tuple(parameter.shape), siblings[family(name)]
            if name in found:
                rows.append(found[name])
            elif len({(row.role, row.redundant, row.decays_to) for row in like}) == 1:
                rows.append(replace(like[0], name=name, shape=shape, trained=parameter.requires_grad))
            elif not parameter.requires_grad:
                rows.append(ModelParameter(name, shape, "other", trained=False))
            elif not every and max(shape, default=1) == parameter.numel():
                rows.append(ModelParameter(name, shape, "other"))
            else:
                why = "is not used in the traced forward pass, and its siblings have no common role"
                hint = f"pass an example that reaches it, freeze it, or give its role in known={{{name!r}: ...}}."
                raise ConfigError(f"parameter {name} {why}; {hint}")
        return tuple(rows)


def _declared_roles(model: nn.Module) -> dict[str, tuple[ModelRole, float | None]]:
    """Return the declarations of our own modules: parameter -> (role, target of the decay)."""
    declared: dict[str, tuple[ModelRole, float | None]] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, ScaleVector):
            of_vector = module.role, _at_zero(module)
            here = {prefix + name: of_vector for name, _ in module.named_parameters()}
            declared = here | declared  # a vector that contains others comes first
        elif isinstance(module, ScaledLinear):
            declared[f"{prefix}weight"] = (module.role, None)
        elif role := getattr(module, "role_of_original", None):  # a parametrization of apply_strategy
            declared[f"{path.rpartition('.')[0]}.original"] = (role, None)
    return declared


def _at_zero(vector: ScaleVector) -> float | None:
    """Return gamma for parameters of 0, to which decay pulls; None if it is not one number."""
    if any(buffer.is_meta or is_fake(buffer) for buffer in vector.buffers()):
        return None
    zeros = {name: torch.zeros(p.shape, dtype=p.dtype, device="cpu") for name, p in vector.named_parameters()}
    state = zeros | {name: buffer.cpu() for name, buffer in vector.named_buffers()}
    with unset_fake_temporarily(), torch.no_grad():
        gamma = functional_call(vector, state, ()).nan_to_num()  # of `or`, whose direction is undefined and beta is 0
    return float(gamma.flatten()[0]) if (gamma == gamma.flatten()[0]).all() else None
