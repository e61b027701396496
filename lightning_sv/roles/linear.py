"""Which results are linear in a vector, and where the vector's channels are in them.

A value is linear in gamma if it is gamma times other data, channel by channel, or a sum of such
values. What an operation does to it depends on the operation's table in `ops`:

    moves      view, transpose, cast                   the channels move with the axes
    ROWS       index, cat, scatter                     rows keep their channels
    TERMS      y + y', a * y, where(mask, y, y')       each term has gamma once, or is fixed
    PRODUCTS   a @ y over positions                    an average with fixed weights
               W @ y, conv(y)                          linear, but the channels are mixed
    MEANS      y.mean(positions)                       the other axes keep their channels
"""

import lightning_sv.roles.ops as ops
from lightning_sv.roles.axes import moved, varying_axes
from lightning_sv.roles.graph import DATA, Node, Use
from lightning_sv.roles.types import agreed

#: axes of a value
Axes = frozenset[int]
#: no axis has the vector's channels: each entry is linear in all of them
MIXED: Axes = frozenset()


class LinearValues:
    """Values that are linear in a vector.

    Attributes:
        axes: value -> the axes of the vector's channels, or `MIXED`
    """

    def __init__(self, axes: dict[Node, Axes]) -> None:
        self.axes = axes

    def uses_in(self, user: Node) -> list[Use]:
        """Return the uses of values that are linear in the vector by one operation."""
        return [use for use in user.inputs if use.value in self.axes]

    def axes_after(self, uses: list[Use]) -> Axes | None:
        """Return the axes of the channels in the result of these uses; None if not linear."""
        first = uses[0]
        user = first.node
        axes = self.axes[first.value]
        if user.moves:
            return moved(first.value, user, axes)
        if user.op in ops.PRODUCTS:
            return self._axes_of_product(uses)
        if user.op in ops.ROWS:
            return self._axes_of_rows(user, uses)
        if user.op in ops.TERMS:
            return self._axes_of_sum(user, uses)
        if user.op in ops.MEANS:
            return _axes_of_mean(user, axes)
        return None

    def _axes_of_product(self, uses: list[Use]) -> Axes | None:
        """Return the axes in an average of positions, or `MIXED` in the product of a matrix."""
        use = uses[0]
        if len(uses) > 1:
            return None
        if self._is_average(use):
            return self.axes[use.value]
        if use.node.reads_only(self.axes):
            return MIXED
        return None

    def _axes_of_rows(self, user: Node, uses: list[Use]) -> Axes | None:
        """Return the axes in rows of linear values; None if one of these is an index."""
        rows = ops.ROWS[user.op]
        for use in uses:
            if use.argument not in rows:
                return None
        return self._shared_axes(uses)

    def _is_average(self, use: Use) -> bool:
        """Return True for a sum of a value's positions, with fixed weights."""
        if use.node.op not in ("mm", "bmm") or use.other_operand.kind == DATA:
            return False
        return use.contracted_axis not in self.axes[use.value]

    def _axes_of_sum(self, user: Node, uses: list[Use]) -> Axes | None:
        axes = self._shared_axes(uses)
        for term in ops.TERMS[user.op]:
            if not self._is_linear_term(user, term, axes):
                return None
        return axes

    def _shared_axes(self, uses: list[Use]) -> Axes:
        """Return the axes of the channels of all values in their result; `MIXED` if they differ."""
        return agreed({self._place(use) for use in uses}) or MIXED

    def _place(self, use: Use) -> Axes:
        """Return the axes of a value's channels in the result of a use."""
        user = use.node
        axes = self.axes[use.value]
        if user.op != "stack":
            return moved(use.value, user, axes)
        new = int(user.scalars.get("dim", 0)) % len(user.shape)
        before = frozenset(range(new))
        shifted = {axis + 1 for axis in axes - before}
        return (axes & before) | shifted

    def _is_linear_term(self, user: Node, term: ops.Term, axes: Axes) -> bool:
        """Return True if a term of a sum is linear in the vector, or does not change.

        A term is linear if the vector is one of its factors and none of its divisors. It does not
        change if it depends on neither the vector nor data. `axes` are those of the vector's
        channels in the result.
        """
        others = user.arguments(term.divisors)
        if not self.axes.keys().isdisjoint(others):
            return False

        n_linear = 0
        for factor in user.arguments(term.factors):
            if factor in self.axes:
                n_linear += 1
            else:
                others.append(factor)
        if n_linear == 0:
            return _is_fixed_term(others, condition=user.argument("condition"))

        coefficients = [_is_coefficient(value, user, axes) for value in others]
        return n_linear == 1 and all(coefficients)


def _axes_of_mean(mean: Node, axes: Axes) -> Axes | None:
    """Return the axes of the channels in a mean of other axes; None if it is one of channels."""
    all_axes = range(len(mean.first.shape))
    averaged = {all_axes[dim] for dim in mean.scalars.get("dim") or all_axes}
    if averaged & axes:
        return None
    if mean.scalars.get("keepdim"):
        return axes
    kept = sorted(set(all_axes) - averaged)
    return frozenset(map(kept.index, axes))


def _is_fixed_term(values: list[Node], condition: Node | None) -> bool:
    """Return True if a term depends on no data; conditions only select."""
    return all(value.is_fixed or value is condition for value in values)


def _is_coefficient(factor: Node, result: Node, axes: Axes) -> bool:
    """Return True for a fixed factor, and for one that is equal for all channels of a result."""
    if factor.is_fixed:
        return True
    if not axes:
        return False
    return axes.isdisjoint(varying_axes(factor, result))
