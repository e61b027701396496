"""Which results are linear in a vector, and where the vector's channels are in them.

A value is linear in gamma if it is gamma times other data, channel by channel, or a sum of such
values. What an operation does to it depends on the operation's table in `ops`:

    moves      view, transpose, cast                   the channels move with the axes
    ROWS       index, cat, scatter                     rows keep their channels
    TERMS      y + y', a * y, where(mask, y, y')       each term has gamma once, or is fixed
    PRODUCTS   a @ y over positions, attention         an average, with weights without gamma
    others     pooling, interpolation                  measured
"""

import lightning_sv.roles.ops as ops
from lightning_sv.roles.axes import contraction, moved, varying_axes
from lightning_sv.roles.graph import DATA, Node
from lightning_sv.roles.measure import channels_of_result, is_measurable
from lightning_sv.roles.types import agreed

#: axes of a value
Axes = frozenset[int]
Inputs = list[tuple[str, Node]]


class LinearValues:
    """Values that are linear in a vector.

    Attributes:
        axes: value -> the axes of the vector's channels; none if they are mixed
        through_gates: if True, the coefficients may be any data: gates, and attention's average
    """

    def __init__(self, axes: dict[Node, Axes], *, through_gates: bool) -> None:
        self.axes = axes
        self.through_gates = through_gates

    def inputs_of(self, user: Node) -> Inputs:
        """Return the inputs of an operation that are linear in the vector."""
        return [(argument, value) for argument, value in user.inputs if value in self.axes]

    def axes_after(self, user: Node, inputs: Inputs) -> Axes | None:
        """Return the axes of the channels in a result of linear `inputs`; None if not linear."""
        argument, value = inputs[0]
        if user.moves:
            return moved(value, user, self.axes[value])
        if user.op in ops.ATTENTION or user.op in ops.PRODUCTS:
            is_average = len(inputs) == 1 and self._is_average(user, argument, value)
            return self.axes[value] if is_average else None
        if user.op in ops.ROWS:
            return self._axes_of_rows(user, inputs)
        if user.op in ops.TERMS:
            return self._axes_of_sum(user, inputs)
        if is_measurable(user):
            return channels_of_result(user, self.axes[value])
        return None

    def _is_average(self, user: Node, argument: str, value: Node) -> bool:
        """Return True for a sum of a value's positions, with weights that are independent of it."""
        if user.op in ops.ATTENTION:
            is_average = argument == "value" and user.output == 0
            return is_average and self.through_gates
        if user.op not in ("mm", "bmm"):
            return False
        if contraction(user, argument, value) in self.axes[value]:
            return False
        (weights,) = user.others(value)
        return self.through_gates or weights.kind != DATA

    def _axes_of_rows(self, user: Node, inputs: Inputs) -> Axes | None:
        """Return the axes in rows of linear values; None if these are an index, too."""
        arguments = {argument for argument, _ in inputs}
        is_index = not arguments.issubset(ops.ROWS[user.op])
        return None if is_index else self._agreed(user, inputs)

    def _axes_of_sum(self, user: Node, inputs: Inputs) -> Axes | None:
        axes = self._agreed(user, inputs)
        if axes is None:
            return None
        terms = ops.TERMS[user.op]
        is_linear = all(self._is_linear_term(user, term, axes) for term in terms)
        return axes if is_linear else None

    def _agreed(self, user: Node, inputs: Inputs) -> Axes | None:
        """Return the axes of the channels of all inputs in a result; None if they differ."""
        return agreed({self._place(user, value) for _, value in inputs})

    def _place(self, user: Node, value: Node) -> Axes:
        """Return the axes of a value's channels in a result."""
        axes = self.axes[value]
        if user.op != "stack":
            return moved(value, user, axes)
        new = int(user.scalars.get("dim", 0)) % len(user.shape)
        before = frozenset(range(new))
        shifted = {axis + 1 for axis in axes - before}
        return (axes & before) | shifted

    def _is_linear_term(self, user: Node, term: ops.Term, axes: Axes) -> bool:
        """Return True if a term of a sum has the vector once, above, or neither vector nor data.

        `axes` are those of the vector's channels in the result.
        """
        factors = user.arguments(term.factors)
        coefficients = user.arguments(term.divisors)
        vectors: list[Node] = []
        for value in factors:
            part = vectors if value in self.axes else coefficients
            part.append(value)

        if not vectors:
            return _is_fixed_term(coefficients, condition=user.argument("condition"))
        if len(vectors) > 1 or not self.axes.keys().isdisjoint(coefficients):
            return False
        if self.through_gates:
            return True
        return all(_is_coefficient(value, user, axes) for value in coefficients)


def _is_fixed_term(values: list[Node], condition: Node | None) -> bool:
    """Return True if a term depends on no data; conditions only select."""
    return all(value.is_fixed or value is condition for value in values)


def _is_coefficient(factor: Node, result: Node, axes: Axes) -> bool:
    """Return True for a fixed factor, and for one that is equal for all channels of a result."""
    if factor.is_fixed:
        return True
    return bool(axes) and axes.isdisjoint(varying_axes(factor, result))
