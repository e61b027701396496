"""Trace of a forward pass as a graph of torch operations.

A `TorchDispatchMode` records every operation below autograd: inside autograd functions, compiled or checkpointed
blocks, in-place writes and loops over data. It runs on real or on fake tensors (`FakeTensorMode`: shapes without
memory); values computed from real tensors only, such as positions, stay real next to fake parameters. Two
tensors are the same value if storage, offset, sizes and strides are equal; an in-place write gives its storage a
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

#: dependence of a value: on neither, parameters, the example, or both
CONST, PARAM, INPUT, DATA = range(4)


@dataclass(slots=True, eq=False)
class Node:
    """One tensor of the pass.

    Attributes:
        op: operation that created it, 'mm' or 'namespace::name'; 'parameter', 'input' or 'buffer' for a source
        inputs: (name of the argument, node) of each input tensor
        shape: sizes
        stride: strides
        scalars: the operation's other arguments, by name
        output: index among the operation's outputs
        is_view: True if it shares the storage of its first input
        kind: CONST, PARAM, INPUT or DATA
        pointwise: True if torch tags the operation as pointwise
        order: position in the pass
        call: the operation itself
        dtype: dtype of the tensor
        users: (name of the argument, node) of each tensor created from it
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
        """Return the input tensor of the argument `name`."""
        return next((node for argument, node in self.inputs if argument == name), None)

    def others(self, node: "Node") -> list["Node"]:
        """Return the input tensors except `node`."""
        return [other for _, other in self.inputs if other is not node]


class Walk:
    """Visit the users of a value, recursively as far as the caller follows.

    Args:
        start: the value
        nearest: if True, visit the nearest users first (breadth first)

    Attributes:
        seen: the value and the followed users
    """

    def __init__(self, start: Node, *, nearest: bool = False) -> None:
        self.seen, self._waiting, self._next = {start}, [start], 0 if nearest else -1

    def __iter__(self) -> Iterator[tuple[Node, str, Node]]:
        """Yield (value, name of the argument, user) of each followed value."""
        while self._waiting:
            value = self._waiting.pop(self._next)
            yield from ((value, argument, user) for argument, user in value.users)

    def follow(self, user: Node) -> None:
        """Also visit the users of `user`, once."""
        if user not in self.seen:
            self.seen.add(user)
            self._waiting.append(user)


@dataclass
class Graph:
    """Nodes in the order of the pass, parameters by name, and the module's outputs."""

    nodes: list[Node]
    parameters: dict[str, Node]
    outputs: set[Node]


class Tracer(TorchDispatchMode):
    """Record a node for each tensor that an operation creates or writes."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        # A weak reference prevents reuse of a storage's address, without keeping its memory.
        self._values: dict[Any, dict[Any, Node]] = {}
        self._whole: dict[Any, Node] = {}

    def source(self, tensor: Tensor, op: str) -> Node:
        """Return the node of a tensor that exists before the pass."""
        kind = {"parameter": PARAM, "input": INPUT}.get(op, CONST)
        node = Node(op, [], tuple(tensor.shape), _strides(tensor), kind=kind, dtype=tensor.dtype)
        self._put(tensor, node)
        return node

    def find(self, tensor: Tensor) -> Node:
        """Return the node of a tensor; unknown tensors are constants."""
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
        arguments = dict(zip(op.arguments, args, strict=False)) | (kwargs or {})
        tensors = {name: values for name, value in arguments.items() if (values := list(_tensors(value)))}
        inputs = [(name, self.find(t)) for name, values in tensors.items() for t in values]
        written = [(name, t) for name in op.written for t in tensors.get(name, ())]
        before = {_storage(t) for values in tensors.values() for t in values}
        out = run_real(func, args, kwargs or {})
        scalars = {name: value for name, value in arguments.items() if name not in tensors}
        kind = _joined(op.name, inputs)

        def node(tensor: Tensor, output: int, is_view: bool) -> Node:
            shape, stride, order = tuple(tensor.shape), _strides(tensor), len(self.nodes)
            result = Node(
                op.name, list(inputs), shape, stride, scalars, output, is_view, kind, op.pointwise, order, func
            )
            result.dtype = tensor.dtype
            for name, source in inputs:
                source.users.append((name, result))
            return result

        for i, tensor in enumerate(_tensors(out)):
            if not any(tensor is target for _, target in written):
                self._put(tensor, node(tensor, i, _storage(tensor) in before))
        for name, tensor in written:
            self._write(tensor, node(tensor, 0, False), name)
        return out

    def _write(self, tensor: Tensor, node: Node, name: str) -> None:
        """Make `node` the value of all tensors that share the storage of `tensor`."""
        storage = _storage(tensor)
        previous = self._whole.get(storage)
        if previous is not None and all(previous is not old for _, old in node.inputs):
            node.inputs.append((name, previous))
            previous.users.append((name, node))
            node.kind = max(node.kind, previous.kind)
        self._values[storage] = {_geometry(tensor): node}
        self._whole[storage] = node
        self.nodes.append(node)


def run_real(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation, outside the fake mode if no tensor is fake, so that its values are real."""
    from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

    if any(isinstance(tensor, FakeTensor) for tensor in _tensors((args, tuple(kwargs.values())))):
        return func(*args, **kwargs)
    with unset_fake_temporarily():
        return func(*args, **kwargs)


class Writes(TorchDispatchMode):
    """Copy each of `tensors` before its first in-place write.

    Copying all of them beforehand would double the memory of a quantized model, whose weights are buffers.
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
        """Copy the tensors that `func` writes, and run it."""
        op = _operation(func)
        if op.written:
            arguments = dict(zip(op.arguments, args, strict=False)) | (kwargs or {})
            for tensor in _tensors([arguments.get(name) for name in op.written]):
                for kept in self._unwritten.pop(_storage(tensor), ()):
                    self._copies.append((kept, kept.clone()))
        return func(*args, **(kwargs or {}))

    def undo(self) -> None:
        """Restore the previous values of written tensors."""
        with torch.no_grad():
            for tensor, before in self._copies:
                tensor.copy_(before)


@dataclass(frozen=True)
class _Operation:
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
        namespace != "prim",  # prim operations query a device or a size
    )


def _joined(op: str, inputs: list[tuple[str, Node]]) -> int:
    """Return the dependence of the result of `op`."""
    if op.startswith(("new_", "empty", "sym_")) or op.endswith("_like"):
        return CONST
    if op in LOOKUPS:
        return DATA
    first = next((node.kind for name, node in inputs if name == "self"), CONST)
    if op in ROWS_WRITTEN:
        return first
    if op in CHOICES_OF_ROWS and first == PARAM and all(node.kind != INPUT for _, node in inputs):
        return PARAM  # the weights of a selected expert are still weights
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
    except (NotImplementedError, RuntimeError):  # a subclass without storage
        return tensor


def place(tensor: Tensor) -> Any:
    """Return a key that is equal for tensors with the same storage and geometry."""
    return _storage(tensor), _geometry(tensor)


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.stride()) if tensor.layout == torch.strided else ()


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    strided = tensor.layout == torch.strided
    return (tuple(tensor.shape), _strides(tensor), tensor.storage_offset() if strided else 0, tensor.dtype)
