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
from lightning_sv.roles.axes import contraction, moved
from lightning_sv.roles.graph import DATA, Node
from lightning_sv.roles.measure import channels_of_result, is_measurable

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

    def matrix_of(self, argument: str, product: Node) -> Node | None:
        """Return the parameters that multiply `argument` in a product; None if there are none."""
        operands = ops.PRODUCTS.get(product.op)
        if operands is None or argument not in operands:
            return None
        first, second = operands
        other = product.argument(second if argument == first else first)
        return other if other is not None and other.is_learned else None

    def axes_after(self, user: Node, inputs: Inputs) -> Axes | None:
        """Return the axes of the channels in a result of linear `inputs`; None if not linear."""
        op = user.op
        if user.moves:
            value = inputs[0][1]
            return moved(value, user, self.axes[value])
        if op in ops.ATTENTION or op in ops.PRODUCTS:
            return self._axes_of_average(user, inputs)
        if op in ops.ROWS:
            return self._axes_of_rows(user, inputs)
        if op in ops.TERMS:
            return self._axes_of_sum(user, inputs)
        if is_measurable(user):
            return channels_of_result(user, self.axes[inputs[0][1]])
        return None

    def _axes_of_average(self, user: Node, inputs: Inputs) -> Axes | None:
        """Return the axes in an average over positions, with weights that are independent of it."""
        if len(inputs) > 1:
            return None
        argument, value = inputs[0]
        if user.op in ops.ATTENTION:
            averages = self.through_gates and argument == "value" and user.output == 0
        else:
            averages = self._is_average(user, argument, value)
        return self.axes[value] if averages else None

    def _is_average(self, product: Node, argument: str, value: Node) -> bool:
        """Return True for a product that does not sum over channels, without weights of data."""
        if product.op not in ("mm", "bmm"):
            return False
        if contraction(product, argument, value) in self.axes[value]:
            return False
        (weights,) = product.others(value)
        return self.through_gates or weights.kind != DATA

    def _axes_of_rows(self, user: Node, inputs: Inputs) -> Axes | None:
        """Return the axes in rows of linear values; None if these are an index, too."""
        arguments = {argument for argument, _ in inputs}
        return self._agreed(user, inputs) if arguments.issubset(ops.ROWS[user.op]) else None

    def _axes_of_sum(self, user: Node, inputs: Inputs) -> Axes | None:
        axes = self._agreed(user, inputs)
        if axes is None:
            return None
        terms = ops.TERMS[user.op]
        is_linear = all(self._is_linear_term(user, term, axes) for term in terms)
        return axes if is_linear else None

    def _agreed(self, user: Node, inputs: Inputs) -> Axes | None:
        """Return the axes of the channels of all inputs in a result; None if they differ."""
        places = {self._place(user, value) for _, value in inputs}
        return places.pop() if len(places) == 1 else None

    def _place(self, user: Node, value: Node) -> Axes:
        axes = self.axes[value]
        if user.op != "stack":
            return moved(value, user, axes)
        new = int(user.scalars.get("dim", 0)) % len(user.shape)
        return frozenset(axis + 1 if axis >= new else axis for axis in axes)

    def _is_linear_term(self, user: Node, term: ops.Term, axes: Axes) -> bool:
        """Return True if a term of a sum has the vector once, above, or neither vector nor data.

        `axes` are those of the vector's channels in the result.
        """
        factors = user.arguments(term.factors)
        divisors = user.arguments(term.divisors)
        linear = [value for value in factors if value in self.axes]
        coefficients = [value for value in factors if value not in self.axes] + divisors
        if not linear:
            return _is_fixed_term(coefficients, condition=user.argument("condition"))
        if len(linear) > 1 or not self.axes.keys().isdisjoint(coefficients):
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
    shift = len(result.shape) - len(factor.shape)
    own = [axis - shift for axis in axes if axis >= shift]
    return bool(axes) and all(factor.shape[axis] == 1 for axis in own)
