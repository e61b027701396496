"""Role of every parameter of any module, from one traced forward pass and not from its name.

    model, example -> Graph -> Dataflow -> a rule per use -> roles per parameter -> Roles

A parameter can have several uses: a tied embedding is also the head. Its role is then the first of
`MODEL_ROLES`. docs/architecture.md has an example, and the reasons of the rules.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from lightning_sv.errors import ConfigError, expect
from lightning_sv.roles.along import head_width
from lightning_sv.roles.classify import LearnedUse, first_rule, uses_of_parameters
from lightning_sv.roles.consumers import UNKNOWN_HINT, Consumer, UnknownConsumerError, consumers
from lightning_sv.roles.dataflow import Dataflow, value_at
from lightning_sv.roles.declared import declared_roles
from lightning_sv.roles.example_inputs import MissingExampleError, example_of
from lightning_sv.roles.graph import Node, Use
from lightning_sv.roles.norms import ScaledValue
from lightning_sv.roles.result import Roles
from lightning_sv.roles.table import family
from lightning_sv.roles.trace import trace
from lightning_sv.roles.types import MODEL_ROLES, WEIGHTS, ModelParameter, ModelRole, agreed

_VECTORS = ("input", "output")


def weight_decay_roles(
    model: nn.Module, example: Any = None, known: Mapping[str, ModelRole] | None = None
) -> Roles:
    """Classify every parameter of `model` from one forward pass.

    Args:
        model: any module; on fake tensors (see `fake_model`) nothing is computed and no memory is
            used. Build it with its head: a final norm without a consumer is not an Input-Norm
        example: inputs of the model: a tensor, a tuple or a dict of keywords. By default 16 token
            ids for our Backbone and for transformers models
        known: roles by parameter name, which take precedence over the trace

    Raises:
        ConfigError: the pass failed, it is unknown whether an operation is linear, or no token
            reached a parameter and its siblings (names that differ only in numbers) disagree; the
            message names it
    """
    traced = TracedModel(model, example, known)
    _check_used(traced.unused)
    return traced.roles


class TracedModel:
    """Roles of a model, with the uses of its parameters in one traced pass.

    Args:
        model: any module
        example: as in `weight_decay_roles`
        known: roles by name, which take precedence over the trace

    Attributes:
        inputs: (args, kwargs) of the pass
        use_roles: parameter -> roles of its uses
        scaled: scale vector -> the values that it scales
        products: matrix -> its uses in products with data
        roles: the result
        unused: trained vectors, such as mask tokens, that have role 'other' because neither the
            pass nor siblings show another

    Raises:
        ConfigError: as `weight_decay_roles`, but for `unused`
    """

    def __init__(
        self,
        model: nn.Module,
        example: Any = None,
        known: Mapping[str, ModelRole] | None = None,
    ):
        self.model = model
        self.inputs = example_of(model, example)  # checks the model
        self.named = dict(model.named_parameters())
        self._declared = declared_roles(model) | _given_roles(known, self.named)
        self.flow = Dataflow(trace(model, *self.inputs))

        # what the uses in the pass show
        self.use_roles: dict[str, set[ModelRole]] = defaultdict(set)
        self.scaled: dict[str, list[ScaledValue]] = defaultdict(list)
        self.products: dict[str, list[Use]] = defaultdict(list)
        self._scales_matrix: set[str] = set()
        for use in uses_of_parameters(self.flow):
            self._note(use)

        # one role per parameter; those that the pass does not use get one from others like them
        self.unused: list[ModelParameter] = []
        self.roles = Roles(tuple(self._classified()))
        unused_matrices = [row for row in self.unused if max(row.shape, default=1) < row.size]
        _check_used(unused_matrices)

    def _note(self, use: LearnedUse) -> None:
        """Record the role that one use gives to the parameters in its value."""
        rule = first_rule(use)
        if rule is None:
            self._check_declared(use)
        elif rule.role == "scale vector":
            values = [ScaledValue(scaled, use.value) for scaled in use.scaled]
            for name in use.names | use.factors:
                self.scaled[name] += values
        elif rule.role is not None:
            self._note_role(use, rule.role)

    def _check_declared(self, use: LearnedUse) -> None:
        """Refuse an unknown operation, unless the roles of its parameters are given."""
        if use.names <= self._declared.keys():
            return
        found = f"{', '.join(sorted(use.names))} is combined with activations in {use.node.op!r}"
        raise ConfigError(f"parameter {found}, an unknown operation; {UNKNOWN_HINT}")

    def _note_role(self, use: LearnedUse, role: ModelRole) -> None:
        is_product_with_data = use.is_operand and not use.node.is_learned
        for name in use.names:
            self.use_roles[name].add(role)
            if is_product_with_data:
                self.products[name].append(use)

        role_of_factors = role
        if role in WEIGHTS:
            role_of_factors = "multiplier"
            self._scales_matrix |= use.factors
        for name in use.factors:
            self.use_roles[name].add(role_of_factors)

    def consumers_of(self, name: str) -> list[Consumer]:
        """Return the consumers of the values that a scale vector scales.

        Raises:
            UnknownConsumerError: it is unknown whether an operation is linear
        """
        return list(consumers(self.scaled.get(name, ()), name))

    def _parameter(self, name: str, role: ModelRole) -> ModelParameter:
        """Return the classification of a parameter."""
        row = self._row(name, role)
        if role in _VECTORS:
            return self._vector(row)
        if role in WEIGHTS:
            return self._matrix(row)
        return row

    def _row(self, name: str, role: ModelRole) -> ModelParameter:
        """Return a parameter with what needs no trace."""
        parameter = self.named[name]
        return ModelParameter(name, tuple(parameter.shape), role, trained=parameter.requires_grad)

    def _vector(self, row: ModelParameter) -> ModelParameter:
        """Return a scale vector with what folding and decay do to it."""
        scaled = self.scaled.get(row.name)
        if scaled:
            gamma_at_zero = value_at(scaled[-1].factor, 0.0)
            return replace(row, redundant=self._folds(row.name), decays_to=gamma_at_zero)
        if row.name in self._scales_matrix:
            return replace(row, redundant=True)
        return row

    def _matrix(self, row: ModelParameter) -> ModelParameter:
        """Return a weight with the axis and the heads on which all its products agree."""
        in_axes = set()
        head_widths = set()
        for product in self.products.get(row.name, ()):
            in_axes.add(self.flow.in_axis(product))
            head_widths.add(head_width(product.node))
        return replace(row, in_axis=agreed(in_axes), head_width=agreed(head_widths))

    def _role(self, name: str) -> ModelRole | None:
        """Return the role of a parameter; None if the pass does not use it."""
        if name in self._declared:
            return self._declared[name]
        roles = set(self.use_roles.get(name, ()))
        if self.scaled.get(name):
            roles.add(self._role_of_vector(name))
        return min(roles, key=MODEL_ROLES.index, default=None)

    def _role_of_vector(self, name: str) -> ModelRole:
        """Return 'input' for the paper's Input-Norm: only matrices read it."""
        matrices = [consumer.matrix for consumer in self.consumers_of(name)]
        if not matrices or None in matrices:
            return "output"
        return "input"

    def _folds(self, name: str) -> bool:
        """Return True if the matrices that read the vector's values can absorb it.

        Nothing else may read these values, and the matrices may multiply nothing else.
        """
        matrices: set[str] = set()
        products: set[Node] = set()
        for product, matrix, along_channels in self._consumers_and_output(name):
            if matrix is None or not along_channels:
                return False
            if not self.flow.is_linear(matrix):
                return False
            matrices |= self.flow.sources[matrix]
            products.add(product)
        return bool(products) and self._multiply_only(matrices, products)

    def _multiply_only(self, matrices: set[str], products: set[Node]) -> bool:
        """Return True if all products of some matrices are these, and none is also a table."""
        of_matrices: set[Node] = set()
        for matrix in matrices:
            if "embedding" in self.use_roles[matrix]:
                return False
            for product in self.products[matrix]:
                of_matrices.add(product.node)
        return of_matrices == products

    def _consumers_and_output(self, name: str) -> list[Consumer]:
        """Return the consumers of a vector's values, also the output; none if one is unknown."""
        outputs = self.flow.graph.outputs
        try:
            return list(consumers(self.scaled[name], name, outputs=outputs))
        except UnknownConsumerError:  # of a vector whose role is given
            return []

    def _classified(self) -> list[ModelParameter]:
        """Return all parameters; those that the pass does not use get the role of siblings."""
        used: dict[str, ModelParameter] = {}
        siblings: dict[str, list[ModelParameter]] = defaultdict(list)
        for name in self.named:
            role = self._role(name)
            if role is not None:
                used[name] = self._parameter(name, role)
                siblings[family(name)].append(used[name])

        rows = []
        for name in self.named:
            row = used.get(name) or self._of_siblings(name, siblings[family(name)])
            rows.append(row)
        return rows

    def _of_siblings(self, name: str, siblings: list[ModelParameter]) -> ModelParameter:
        """Return the classification that all siblings of an unused parameter have."""
        row = self._row(name, "other")
        kinds = {(sibling.role, sibling.redundant, sibling.decays_to) for sibling in siblings}
        if len(kinds) == 1:
            return replace(siblings[0], name=name, shape=row.shape, trained=row.trained)
        if row.trained:
            self.unused.append(row)
        return row


def _check_used(unused: list[ModelParameter]) -> None:
    """Refuse trained parameters without a role."""
    if not unused:
        return
    name = unused[0].name
    why = "is not used in the traced forward pass, and its siblings have no common role"
    roles = f"give weight_decay_roles its role in known={{{name!r}: ...}}"
    remedies = f"pass an example that reaches it, freeze it for apply_strategy, or {roles}."
    raise MissingExampleError(f"parameter {name} {why}; {remedies}")


def _given_roles(
    known: Mapping[str, ModelRole] | None, named: Mapping[str, nn.Parameter]
) -> dict[str, ModelRole]:
    """Check the roles that the caller gives.

    Raises:
        ConfigError: there is no such parameter, or no such role
    """
    if known is None:
        return {}
    expected = f"a parameter of the model and one of: {' '.join(MODEL_ROLES)}."
    for name, role in known.items():
        is_usable = name in named and role in MODEL_ROLES
        expect(is_usable, f"known[{name!r}]", repr(role), expected)
    return dict(known)
