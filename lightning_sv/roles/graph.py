"""Graph of a traced pass, and the order in which its values are read.

A node is one tensor. Its inputs are the tensors that an operation read, its users the tensors that
operations made of it:

    weight (parameter) -> t -> mm -> relu -> ...
    x (input) ---------------> mm
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lightning_sv.roles.ops import COPIES

#: dependence of a value, as bits: on neither, parameters, the example, or both
CONST = 0
PARAM = 1
INPUT = 2
DATA = PARAM | INPUT


@dataclass(slots=True, eq=False)
class Node:
    """One tensor of the pass."""

    #: operation that created it, 'mm' or 'namespace::name'; of a source 'parameter' or 'input'
    op: str
    inputs: list[tuple[str, "Node"]]  #: (name of the argument, node) of each input tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    scalars: dict[str, Any] = field(default_factory=dict)  #: the other arguments, by name
    output: int = 0  #: index among the operation's outputs
    is_view: bool = False  #: whether it shares the storage of its first input
    kind: int = CONST  #: CONST, PARAM, INPUT or DATA
    order: int = 0  #: position in the pass
    call: Any = None  #: the operation itself
    #: (name of the argument, node) created from it
    users: list[tuple[str, "Node"]] = field(default_factory=list)

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
        return [value for _, value in self.inputs]

    @property
    def learned_values(self) -> list["Node"]:
        """Input tensors that depend on parameters alone."""
        return [value for value in self.values if value.is_learned]

    @property
    def first(self) -> "Node":
        """First input tensor."""
        return self.inputs[0][1]

    @property
    def by_argument(self) -> dict[str, "Node"]:
        """Name of an argument -> its first tensor; a write in place adds the old value behind."""
        return dict(reversed(self.inputs))

    def argument(self, name: str) -> "Node | None":
        """Return the input tensor of the argument `name`."""
        return self.by_argument.get(name)

    def arguments(self, names: Collection[str]) -> list["Node"]:
        """Return the input tensors of the arguments `names`."""
        return [value for argument, value in self.inputs if argument in names]

    def others(self, node: "Node") -> list["Node"]:
        """Return the input tensors except `node`."""
        return self.outside({node})

    def outside(self, known: Collection["Node"]) -> list["Node"]:
        """Return the input tensors that are not `known` values."""
        return [value for value in self.values if value not in known]

    def users_by_order(self) -> dict[int, "Node"]:
        """Return position in the pass -> operation that reads the value and depends on it."""
        return {user.order: user for _, user in self.users if not user.is_const}

    def reads_only(self, known: Collection["Node"]) -> bool:
        """Return True if all inputs of the operation are fixed or `known` values."""
        return all(value.is_fixed for value in self.outside(known))


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


def plain(node: Node) -> Node:
    """Return `node` before views and copies."""
    while node.moves:
        node = node.first
    return node
