"""Traced forward pass: a graph of torch operations, recorded without a change of the model.

A `TorchDispatchMode` records every operation below autograd: inside autograd functions, compiled or
checkpointed blocks, in-place writes and loops over data. It runs on real or on fake tensors
(`FakeTensorMode`: shapes without memory); values computed from real tensors only, such as
positions, stay real next to fake parameters.

Two tensors are the same value if storage, offset, sizes and strides are equal. An in-place write
gives its storage a new value that depends on the old one:

    x.view(2, 8)      a node of its own, with x as its input
    x.mul_(2)         a new node; later reads of x, and of its views, find this one
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lightning_sv.errors import ConfigError
from lightning_sv.roles.forward import copied, logits_of, strides, traced_execution
from lightning_sv.roles.graph import CONST, DATA, INPUT, PARAM, Graph, Node
from lightning_sv.roles.ops import CHOICES_OF_ROWS, LOOKUPS

#: kind of a value that exists before the pass; others are constants
_SOURCES = {"parameter": PARAM, "input": INPUT}


class _Operation(NamedTuple):
    """What the schema of a torch operation says."""

    name: str
    arguments: tuple[str, ...]
    written: tuple[str, ...]  #: arguments that it changes in place
    recorded: bool


@cache
def _operation(func: Any) -> _Operation:
    schema = func._schema
    namespace, _, name = schema.name.partition("::")
    aliased = [argument for argument in schema.arguments if argument.alias_info is not None]
    return _Operation(
        name=name.rstrip("_") if namespace == "aten" else schema.name,
        arguments=tuple(argument.name for argument in schema.arguments),
        written=tuple(argument.name for argument in aliased if argument.alias_info.is_write),
        recorded=namespace != "prim",  # prim operations query a device or a size
    )


@dataclass(frozen=True)
class _Call:
    """One call of an operation."""

    func: Any
    op: _Operation
    inputs: list[tuple[str, Node]]
    scalars: dict[str, Any]
    kind: int


@dataclass
class _Stored:
    """Values in one storage since its last write.

    Attributes:
        latest: value of the tensor that was written, or that made the storage known; a tensor of
            unseen geometry has this value
        views: geometry -> value of the tensors that have it
    """

    latest: Node
    views: dict[Any, Node]


class Tracer(TorchDispatchMode):
    """Record a node for each tensor that an operation creates or writes."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        # by storage: a weak reference prevents reuse of its address, without keeping its memory
        self._stored: dict[Any, _Stored] = {}

    def source(self, tensor: Tensor, op: str) -> Node:
        """Return the node of a tensor that exists before the pass."""
        kind = _SOURCES.get(op, CONST)
        node = Node(op, tuple(tensor.shape), strides(tensor), tensor.dtype, kind=kind)
        self._record_new(tensor, node)
        return node

    def find(self, tensor: Tensor) -> Node:
        """Return the node of a tensor; unknown tensors are constants."""
        stored = self._stored.get(_storage(tensor))
        if stored is None:
            return self.source(tensor, "constant")
        return stored.views.get(_geometry(tensor), stored.latest)

    def _record_new(self, tensor: Tensor, node: Node) -> None:
        """Record the value of a new tensor, which may be a view of a known storage."""
        stored = self._stored.setdefault(_storage(tensor), _Stored(node, {}))
        stored.views[_geometry(tensor)] = node
        self.nodes.append(node)

    def _record_write(self, tensor: Tensor, node: Node, argument: str) -> None:
        """Record that a write makes `node` the value of all tensors of a storage.

        A write into a part also leaves the rest of the storage, so the node depends on its previous
        value, as if the operation had read that in its argument.
        """
        storage = _storage(tensor)
        stored = self._stored.get(storage)  # unknown if the operation is set_
        if stored is not None and stored.latest not in node.values:
            node.read(argument, stored.latest)
            node.kind |= stored.latest.kind
        self._stored[storage] = _Stored(node, {_geometry(tensor): node})
        self.nodes.append(node)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func` and record it."""
        kwargs = kwargs or {}
        op = _operation(func)
        if not op.recorded:
            return func(*args, **kwargs)

        arguments = dict(zip(op.arguments, args, strict=False)) | kwargs
        tensors = _named_tensors(arguments)
        call = self._call(func, op, arguments, tensors)  # before the operation writes
        is_real = not any(isinstance(tensor, FakeTensor) for _, tensor in tensors)
        with unset_fake_temporarily() if is_real else nullcontext():
            out = func(*args, **kwargs)
        self._record(call, tensors, _tensors(out))
        return out

    def _record(
        self, call: _Call, tensors: list[tuple[str, Tensor]], results: list[Tensor]
    ) -> None:
        """Record the new tensors of a call, and those that it wrote."""
        read = {_storage(tensor) for _, tensor in tensors}
        written = [(name, tensor) for name, tensor in tensors if name in call.op.written]
        targets = {id(tensor) for _, tensor in written}  # x.add_(y) returns x itself
        new = [(i, tensor) for i, tensor in enumerate(results) if id(tensor) not in targets]
        for i, tensor in new:
            node = self._result(call, tensor, i, is_view=_storage(tensor) in read)
            self._record_new(tensor, node)
        for name, tensor in written:
            node = self._result(call, tensor)
            self._record_write(tensor, node, name)

    def _call(
        self,
        func: Any,
        op: _Operation,
        arguments: dict[str, Any],
        tensors: list[tuple[str, Tensor]],
    ) -> _Call:
        names = {name for name, _ in tensors}
        inputs = [(name, self.find(tensor)) for name, tensor in tensors]
        scalars = {name: value for name, value in arguments.items() if name not in names}
        return _Call(func, op, inputs, scalars, _kind_of_result(op.name, inputs))

    def _result(self, call: _Call, tensor: Tensor, output: int = 0, is_view: bool = False) -> Node:
        """Return a new node of a call, known to its inputs."""
        node = Node(
            op=call.op.name,
            shape=tuple(tensor.shape),
            stride=strides(tensor),
            dtype=tensor.dtype,
            scalars=call.scalars,
            output=output,
            is_view=is_view,
            kind=call.kind,
            order=len(self.nodes),
            call=call.func,
        )
        for name, value in call.inputs:
            node.read(name, value)
        return node


def _kind_of_result(op: str, inputs: list[tuple[str, Node]]) -> int:
    """Return CONST, PARAM, INPUT or DATA for the result of `op`."""
    if op.startswith(("new_", "empty", "sym_")) or op.endswith("_like"):
        return CONST
    if op in LOOKUPS:
        return DATA
    if op in CHOICES_OF_ROWS and _chooses_weights(inputs):
        return PARAM  # the weights of a selected expert are still weights
    kinds = {node.kind for _, node in inputs}
    return reduce(or_, kinds, CONST)


def _chooses_weights(inputs: list[tuple[str, Node]]) -> bool:
    """Return True for rows of a learned table that data select, but not the example alone."""
    (name, table), *indices = inputs
    is_lookup = any(index.kind == INPUT for _, index in indices)
    return name == "self" and table.is_learned and not is_lookup


def _named_tensors(arguments: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Return (name of the argument, tensor), several for an argument with a list."""
    found = []
    for name, value in arguments.items():
        found += [(name, tensor) for tensor in _tensors(value)]
    return found


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> Any:
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # a subclass without storage
        return tensor


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    offset = tensor.storage_offset() if tensor.layout == torch.strided else 0
    return (tuple(tensor.shape), strides(tensor), offset, tensor.dtype)


def trace(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Graph:
    """Run `model(*args, **kwargs)` once and return its graph.

    Mode, buffers and the CPU's random state are restored.

    Raises:
        ConfigError: the pass failed
    """
    tracer = Tracer()
    args, kwargs = copied((args, dict(kwargs)))
    with traced_execution(model):
        parameters = {name: tracer.source(p, "parameter") for name, p in model.named_parameters()}
        for tensor in model.buffers():
            tracer.source(tensor, "buffer")
        for tensor in _tensors((args, kwargs)):
            tracer.source(tensor, "input")
        with _failures_reported(model), tracer:
            out = model(*args, **kwargs)
        outputs = set(map(tracer.find, _tensors(logits_of(out))))
    return Graph(tracer.nodes, parameters, outputs)


@contextmanager
def _failures_reported(model: nn.Module) -> Iterator[None]:
    """Raise ConfigError for any error of a model's code."""
    try:
        yield
    except ConfigError:  # a check of ours names its own remedy
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ConfigError(_reads_values(model, error)) from error
    except Exception as error:
        raise ConfigError(_failure(error)) from error


def _reads_values(model: nn.Module, error: Any) -> str:
    why = f"{type(model).__name__} reads a tensor's values in its forward pass ({error.func})"
    hint = "Build the model with its weights, and pass it to weight_decay_roles in Python."
    expected = "expected a model that does not"
    return f"{why}, and a fake tensor has none; {expected}. {hint}"


def _failure(error: Exception) -> str:
    why = " ".join(str(error).split())[:300]
    return (
        f"the traced forward pass failed ({type(error).__name__}: {why}); expected an example that "
        "the model accepts (a dict has the keywords of forward; give a dict that is its only "
        "argument as (dict,)), and a model without flex_attention, torch.cond and other "
        "higher-order operators. In transformers, call "
        'model.set_attn_implementation("sdpa") first. A model that needs autocast must enter it '
        "itself."
    )
