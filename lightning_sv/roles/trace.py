"""One forward pass of any module as a graph of the operations that torch ran.

A `TorchDispatchMode` sees every operation below autograd: inside autograd functions, compiled or checkpointed blocks,
in-place writes and loops over data. It runs on real or on fake tensors (`FakeTensorMode`: sizes without memory); what
is computed from real tensors alone, as positions from token ids, keeps its numbers beside fake parameters. Two
tensors are one value where storage, offset, sizes and strides are equal; an in-place write gives its whole storage a
new value that depends on the old one.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sv.roles.ops import CHOICES_OF_ROWS, LOOKUPS, ROWS_WRITTEN

#: what a value depends on: neither, parameters, the example, or both
CONST, PARAM, INPUT, DATA = range(4)


@dataclass(slots=True, eq=False)
class Node:
    """One tensor of the pass.

    Attributes:
        op: the operation that made it, 'mm' or 'namespace::name'; 'parameter', 'input' or 'buffer' of a source
        inputs: (name of the argument, node) of each tensor it was made from
        shape: sizes
        stride: strides
        scalars: the operation's other arguments, by name
        output: which of the operation's tensors it is
        is_view: it shares the storage of its first input
        kind: CONST, PARAM, INPUT or DATA
        pointwise: torch says that it acts element by element
        order: place in the pass
        call: the operation itself
        dtype: of its numbers
        users: (name of the argument, node) of each tensor made from it
    """

    op: str
    inputs: list[tuple[str, "Node"]]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    scalars: dict[str, Any] = field(default_factory=dict)
    output: int = 0
    is_view: bool = False
    kind: int = CONST
    pointwise: bool = False
    order: int = 0
    call: Any = None
    dtype: torch.dtype | None = None
    users: list[tuple[str, "Node"]] = field(default_factory=list)

    def argument(self, name: str) -> "Node | None":
        """Return the tensor that was given as `name`."""
        return next((node for argument, node in self.inputs if argument == name), None)

    def others(self, node: "Node") -> list["Node"]:
        """Return the tensors it was made from but `node`."""
        return [other for _, other in self.inputs if other is not node]


class Walk:
    """Visit what is made of a value, as far as the caller follows.

    Args:
        start: the value
        nearest: if True, visit the nearest users first, else follow each to its end

    Attributes:
        seen: the value, and the users that were followed
    """

    def __init__(self, start: Node, *, nearest: bool = False) -> None:
        self.seen, self._waiting, self._next = {start}, [start], 0 if nearest else -1

    def __iter__(self) -> Iterator[tuple[Node, str, Node]]:
        """Yield (value, name of the argument, user) of each followed value."""
        while self._waiting:
            value = self._waiting.pop(self._next)
            yield from ((value, argument, user) for argument, user in value.users)

    def follow(self, user: Node) -> None:
        """Visit the users of `user` too, once."""
        if user not in self.seen:
            self.seen.add(user)
            self._waiting.append(user)


@dataclass
class Graph:
    """Nodes in the order they were made; the parameters' by name; those that the module returned."""

    nodes: list[Node]
    parameters: dict[str, Node]
    outputs: set[Node]


class Tracer(TorchDispatchMode):
    """Records a node for each tensor that an operation makes or writes."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        # A weak reference keeps a storage's address from being used again, and its memory not.
        self._values: dict[Any, dict[Any, Node]] = {}
        self._whole: dict[Any, Node] = {}

    def source(self, tensor: Tensor, op: str) -> Node:
        """Return the node of a tensor that is there before the pass."""
        kind = {"parameter": PARAM, "input": INPUT}.get(op, CONST)
        node = Node(op, [], tuple(tensor.shape), _strides(tensor), kind=kind, dtype=tensor.dtype)
        self._put(tensor, node)
        return node

    def find(self, tensor: Tensor) -> Node:
        """Return the node of a tensor; one that was never seen is a constant."""
        storage = _storage(tensor)
        values = self._values.get(storage, {})
        node = values.get(_geometry(tensor)) or self._whole.get(storage)
        return self.source(tensor, "constant") if node is None else node

    def _put(self, tensor: Tensor, node: Node) -> None:
        storage = _storage(tensor)
        self._values.setdefault(storage, {})[_geometry(tensor)] = node
        self._whole.setdefault(storage, node)
        self.nodes.append(node)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` and record it."""
        op = _operation(func)
        if not op.recorded:
            return func(*args, **(kwargs or {}))
        given = dict(zip(op.arguments, args, strict=False)) | (kwargs or {})
        tensors = {name: found for name, value in given.items() if (found := list(_tensors(value)))}
        inputs = [(name, self.find(t)) for name, values in tensors.items() for t in values]
        written = [(name, t) for name in op.written for t in tensors.get(name, ())]
        before = {_storage(t) for values in tensors.values() for t in values}
        out = run_real(func, args, kwargs or {})
        scalars = {name: value for name, value in given.items() if name not in tensors}
        kind = _joined(op.name, inputs)

        def node(tensor: Tensor, output: int, is_view: bool) -> Node:
            shape, stride, order = tuple(tensor.shape), _strides(tensor), len(self.nodes)
            made = Node(op.name, list(inputs), shape, stride, scalars, output, is_view, kind, op.pointwise, order, func)
            made.dtype = tensor.dtype
            for name, source in inputs:
                source.users.append((name, made))
            return made

        for i, tensor in enumerate(_tensors(out)):
            if not any(tensor is target for _, target in written):
                self._put(tensor, node(tensor, i, _storage(tensor) in before))
        for name, tensor in written:
            self._write(tensor, node(tensor, 0, False), name)
        return out

    def _write(self, tensor: Tensor, node: Node, name: str) -> None:
        """Make `node` the value of all that shares the storage of `tensor`."""
        storage = _storage(tensor)
        whole = self._whole.get(storage)
        if whole is not None and all(whole is not old for _, old in node.inputs):
            node.inputs.append((name, whole))
            whole.users.append((name, node))
            node.kind = max(node.kind, whole.kind)
        self._values[storage] = {_geometry(tensor): node}
        self._whole[storage] = node
        self.nodes.append(node)


def run_real(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation, outside of a fake mode if none of its tensors is fake, so that its numbers can be read."""
    from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

    if any(isinstance(tensor, FakeTensor) for tensor in _tensors((args, tuple(kwargs.values())))):
        return func(*args, **kwargs)
    with unset_fake_temporarily():
        return func(*args, **kwargs)


class Writes(TorchDispatchMode):
    """Keeps a copy of each of `tensors` from before it is first written in place.

    A copy of all beforehand would take as much memory as a quantized model, whose weights are buffers.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._unwritten: dict[Any, list[Tensor]] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []
        for tensor in tensors:
            self._unwritten.setdefault(_storage(tensor), []).append(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Copy what `func` is about to write, and run it."""
        op = _operation(func)
        if op.written:
            given = dict(zip(op.arguments, args, strict=False)) | (kwargs or {})
            for tensor in _tensors([given.get(name) for name in op.written]):
                for kept in self._unwritten.pop(_storage(tensor), ()):
                    self._copies.append((kept, kept.clone()))
        return func(*args, **(kwargs or {}))

    def undo(self) -> None:
        """Give what was written its numbers of before."""
        with torch.no_grad():
            for tensor, before in self._copies:
                tensor.copy_(before)


@dataclass(frozen=True)
class _Operation:
    """What the schema of an operation says."""

    name: str
    arguments: tuple[str, ...]
    written: tuple[str, ...]
    pointwise: bool
    recorded: bool


@cache
def _operation(func: Any) -> _Operation:
    namespace, _, name = func._schema.name.partition("::")
    arguments = func._schema.arguments
    return _Operation(
        name.rstrip("_") if namespace == "aten" else func._schema.name,
        tuple(argument.name for argument in arguments),
        tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write),
        torch.Tag.pointwise in func.tags,
        namespace != "prim",  # those ask for a device or a size
    )


def _joined(op: str, inputs: list[tuple[str, Node]]) -> int:
    """Return what the result of `op` depends on."""
    if op.startswith(("new_", "empty", "sym_")) or op.endswith("_like"):
        return CONST
    if op in LOOKUPS:
        return DATA
    first = next((node.kind for name, node in inputs if name == "self"), CONST)
    if op in ROWS_WRITTEN:
        return first
    if op in CHOICES_OF_ROWS and first == PARAM and all(node.kind != INPUT for _, node in inputs):
        return PARAM  # the weights of the expert that was chosen are still weights
    kinds = {node.kind for _, node in inputs}
    return DATA if {PARAM, INPUT} <= kinds else max(kinds, default=CONST)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _storage(tensor: Tensor) -> Any:
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # a subclass without a storage: itself, kept alive
        return tensor


def place(tensor: Tensor) -> Any:
    """Return what is equal for tensors of the same numbers in memory."""
    return _storage(tensor), _geometry(tensor)


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.stride()) if tensor.layout == torch.strided else ()


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    strided = tensor.layout == torch.strided
    return (tuple(tensor.shape), _strides(tensor), tensor.storage_offset() if strided else 0, tensor.dtype)
