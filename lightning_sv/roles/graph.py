"""Graph of a traced pass, and walks along its values.

A node is one tensor, with the operation that made it. A use is an edge: one tensor that an
operation read, as one of its arguments.

    weight (parameter) -> t -> mm -> relu -> ...       the uses of mm: self is x, mat2 is t
    x (input) ---------------> mm
"""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lightning_sv.roles.ops import CONVOLUTIONS, COPIES, PRODUCTS, TRANSPOSED

#: dependence of a value, as bits: on neither, parameters, the example, or both
CONST = 0
PARAM = 1
INPUT = 2
DATA = PARAM | INPUT


@dataclass(eq=False)
class Use:
    """One tensor that an operation reads."""

    node: "Node"  #: result of the operation
    argument: str  #: name of the argument
    value: "Node"  #: the tensor

    @property
    def is_operand(self) -> bool:
        """True for an operand of a product."""
        return self.argument in PRODUCTS.get(self.node.op, ())

    @property
    def other_operand(self) -> "Node":
        """The operand that a product multiplies the value by."""
        others = set(PRODUCTS[self.node.op]) - {self.argument}
        (other,) = self.node.arguments(others)
        return other

    @property
    def matrix(self) -> "Node | None":
        """The operand of a linear map of the value, if it depends on parameters alone."""
        if self.is_operand and self.other_operand.is_learned:
            return self.other_operand
        return None

    @property
    def contracted_axis(self) -> int:
        """Axis of the value that the product sums over."""
        if self.node.op in CONVOLUTIONS:
            return 1

        last = len(self.value.shape) - 1
        _, matrix = PRODUCTS[self.node.op]
        if self.argument != matrix or self.node.op in TRANSPOSED:
            return last
        return max(last - 1, 0)  # the first axis of (in, out), or the only one of a vector


@dataclass(slots=True, eq=False)
class Node:
    """One tensor of the pass."""

    #: operation that created it, 'mm' or 'namespace::name'; of a source 'parameter' or 'input'
    op: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    scalars: dict[str, Any] = field(default_factory=dict)  #: the other arguments, by name
    output: int = 0  #: index among the operation's outputs
    is_view: bool = False  #: whether it shares the storage of its first input
    kind: int = CONST  #: CONST, PARAM, INPUT or DATA
    order: int = 0  #: position in the pass
    call: Any = None  #: the operation itself
    inputs: list[Use] = field(default_factory=list)  #: what the operation read
    users: list[Use] = field(default_factory=list)  #: by operations that read this tensor

    def read(self, argument: str, value: "Node") -> None:
        """Record that the operation read a tensor."""
        use = Use(self, argument, value)
        self.inputs.append(use)
        value.users.append(use)

    @property
    def moves(self) -> bool:
        """True for a view or a copy: its first input, elsewhere or in another dtype."""
        return self.is_view or self.op in COPIES

    @property
    def pointwise(self) -> bool:
        """True if torch tags the operation as pointwise."""
        return self.call is not None and torch.Tag.pointwise in self.call.tags

    @property
    def is_const(self) -> bool:
        """True if it depends neither on parameters nor on the example."""
        return self.kind == CONST

    @property
    def is_learned(self) -> bool:
        """True if it depends on parameters alone."""
        return self.kind == PARAM

    @property
    def is_fixed(self) -> bool:
        """True if it does not depend on the example."""
        return self.kind in (CONST, PARAM)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def values(self) -> list["Node"]:
        """Input tensors."""
        return [use.value for use in self.inputs]

    @property
    def learned_values(self) -> list["Node"]:
        """Input tensors that depend on parameters alone."""
        return [value for value in self.values if value.is_learned]

    @property
    def first(self) -> "Node":
        """First input tensor."""
        return self.inputs[0].value

    def argument(self, name: str) -> "Node | None":
        """Return the input tensor of the argument `name`, the first if a write added another."""
        values = self.arguments({name})
        return values[0] if values else None

    def arguments(self, names: Collection[str]) -> list["Node"]:
        """Return the input tensors of the arguments `names`."""
        return [use.value for use in self.inputs if use.argument in names]

    def others(self, node: "Node") -> list["Node"]:
        """Return the input tensors except `node`."""
        return self.outside({node})

    def outside(self, known: Collection["Node"]) -> list["Node"]:
        """Return the input tensors that are not `known` values."""
        return [value for value in self.values if value not in known]

    def users_by_order(self) -> dict[int, "Node"]:
        """Return position in the pass -> operation that reads the value and depends on it."""
        users = {}
        for use in self.users:
            if not use.node.is_const:
                users[use.node.order] = use.node
        return users

    def reads_only(self, known: Collection["Node"]) -> bool:
        """Return True if all inputs of the operation are fixed or `known` values."""
        return self.kinds_outside(known) <= {CONST, PARAM}

    def kinds_outside(self, known: Collection["Node"]) -> set[int]:
        """Return the kinds of the input tensors that are not `known` values."""
        return {value.kind for value in self.outside(known)}


class Graph(NamedTuple):
    """Nodes in the order of the pass, parameters by name, and the outputs of the model."""

    nodes: list[Node]
    parameters: dict[str, Node]
    outputs: set[Node]


def users_in_order(values: Collection[Node]) -> Iterator[Node]:
    """Yield the users of `values` that depend on them in the order of the pass, once each.

    A caller that adds a user to `values` follows it: its users come, too. When a user comes, the
    caller has decided on all of its inputs.
    """
    waiting: dict[int, Node] = {}  # by their order
    for value in values:
        waiting |= value.users_by_order()

    while waiting:
        user = waiting.pop(min(waiting))
        if user not in values:
            yield user
        if user in values:  # followed; its users are later in the pass
            waiting |= user.users_by_order()


class Region(NamedTuple):
    """Values that are alike in some way, and the operations at which that ends.

    Attributes:
        values: a value, and the results of all followed operations
        ends: operations that read one of the values and are not followed
    """

    values: set[Node]
    ends: list[Node]


def follow(start: Node, keeps: Callable[[Node, Collection[Node]], bool]) -> Region:
    """Follow a value through all operations for which `keeps(operation, values)` is True."""
    region = Region({start}, [])
    for user in users_in_order(region.values):
        if keeps(user, region.values):
            region.values.add(user)
        else:
            region.ends.append(user)
    return region


def plain(node: Node) -> Node:
    """Return `node` before views and copies."""
    while node.moves:
        node = node.first
    return node
