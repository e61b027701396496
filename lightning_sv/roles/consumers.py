"""Consumers of the values that a scale vector scales: linear maps, other operations, the output.

From each scaled value the walk follows everything that is linear in the vector, in the order of
the pass. A matrix consumes a value, and the walk goes on behind it, because h + conv(h) is as
linear as h is: the sum is one more value to be consumed.

    gamma * xhat -> view -> mm(W)            consumed by W
                         -> conv -> add      consumed by the convolution; then the sum, too
                         -> softmax          consumed by something else
"""

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import lightning_sv.roles.ops as ops
from lightning_sv.errors import ConfigError
from lightning_sv.roles.axes import varying_axes
from lightning_sv.roles.graph import Node, Use, plain, users_in_order
from lightning_sv.roles.linear import Axes, LinearValues
from lightning_sv.roles.norms import ScaledValue

_TABLES = (ops.MIXING, ops.PRODUCTS, ops.ROWS, ops.TERMS)
#: what helps if an operation is unknown
UNKNOWN_HINT = (
    "trace a plain model (no quantization, no fused kernel), or add the operation to "
    "lightning_sv.roles.ops. weight_decay_roles also accepts the role in known; "
    "apply_strategy does not."
)


class UnknownConsumerError(ConfigError):
    """A value is read by an operation whose linearity is unknown."""


class Consumer(NamedTuple):
    """An operation that consumes a value.

    Attributes:
        node: its result
        matrix: the parameter operand of a linear map; None for other operations
        along_channels: whether the linear map sums over the value's channels, and can absorb their
            factors
    """

    node: Node
    matrix: Node | None = None
    along_channels: bool = False


def consumers(
    scaled: Iterable[ScaledValue],
    name: str,
    *,
    outputs: Collection[Node] = (),
) -> Iterator[Consumer]:
    """Yield the consumers of all values that are linear in a scale vector.

    `scaled` has products of a normalized value and the scale vector, each with the vector's factor.
    Values stay linear in the vector if coefficients are constants, parameters, or one number per
    position: views, casts, selected rows, sums over positions, biases, and sums of such values.
    `outputs` are values that the model returns, which also consumes them.

    Raises:
        UnknownConsumerError: an operation of several tensors, or of a library, is in no table
    """
    walk = _LinearWalk(scaled, name)
    yield from walk.consumers()
    for value in walk.unread.intersection(outputs):
        yield Consumer(value)


class _LinearWalk:
    """Walk from the scaled values along everything that is linear in their vector.

    Values that no matrix has read yet need a consumer. Those behind a matrix concern the matrix
    alone, but a sum of both kinds is linear, and needs one:

        y = gamma * xhat        unread
        conv(y)                 linear, behind a matrix; its relu would not matter
        y + conv(y)             unread again

    Attributes:
        linear: values that are linear in the vector, of both kinds
        unread: those that need a consumer
    """

    def __init__(self, scaled: Iterable[ScaledValue], name: str) -> None:
        self.linear = LinearValues({start.value: _channels(start) for start in scaled})
        self.unread = set(self.linear.axes)
        self.name = name

    def consumers(self) -> Iterator[Consumer]:
        """Yield the consumers in the order of the pass; first the values returned unchanged."""
        for start in list(self.linear.axes):
            if not start.users:
                yield Consumer(start)
        for user in users_in_order(self.linear.axes):  # inputs are decided first
            yield from self._consumers_in(user)

    def _consumers_in(self, user: Node) -> Iterator[Consumer]:
        """Yield what consumes values in one operation; record its result if that is linear."""
        uses = self.linear.uses_in(user)
        reads_as_it_is = False
        for use in uses:
            if use.value not in self.unread:
                continue
            if use.matrix is None:
                reads_as_it_is = True
            else:
                yield Consumer(user, use.matrix, self._is_along_channels(use))

        axes = self.linear.axes_after(uses)
        if axes is not None:
            self.linear.axes[user] = axes
            if reads_as_it_is:
                self.unread.add(user)
        elif reads_as_it_is:
            self._check_known(user)
            yield Consumer(user)

    def _check_known(self, user: Node) -> None:
        """Refuse an operation of which it is unknown whether it is linear."""
        is_function_of_torch = "::" not in user.op and len(user.inputs) == 1  # such as a pooling
        is_in_table = any(user.op in table for table in _TABLES)
        is_known = user.pointwise or is_in_table or is_function_of_torch
        if is_known and user.op not in ops.QUANTIZES:
            return

        what = f"{self.name} scales a value read by {user.op!r}"
        raise UnknownConsumerError(
            f"{what}, and it is unknown whether that is a linear map; {UNKNOWN_HINT}"
        )

    def _is_along_channels(self, use: Use) -> bool:
        """Return True if a product sums over a value's channels, and over them alone."""
        channels = self.linear.axes[use.value]
        if use.node.op in ops.BATCHED:
            channels -= {0}  # one vector per matrix
        return channels == {use.contracted_axis}


def _channels(scaled: ScaledValue) -> Axes:
    """Return the axes of a scaled value along which its factor varies."""
    start = scaled.value
    factor = scaled.factor
    if start.op in ops.CHANNELS_FIRST:
        return frozenset({1})

    axes = varying_axes(factor, start)
    if plain(factor).op in ops.CHOICES_OF_ROWS:  # one expert's vector per row
        row_axis = len(start.shape) - len(factor.shape)
        axes -= {row_axis}
    return axes
