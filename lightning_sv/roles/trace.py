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

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

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
from lightning_sv.roles.forward import copied, logits_of, traced_execution
from lightning_sv.roles.graph import CONST, DATA, INPUT, PARAM, Graph, Node
from lightning_sv.roles.ops import CHOICES_OF_ROWS, LOOKUPS

#: kind of a value that exists before the pass; others are constants
_SOURCES = {"parameter": PARAM, "input": INPUT}


class _Operation(NamedTuple):
    """What the schema of a torch operation says."""

    name: str
    arguments: list[str]
    written: set[str]  #: arguments that it changes in place


@cache
def _operation(func: Any) -> _Operation:
    schema = func._schema
    name = schema.name
    if name.startswith("aten::"):
        name = name.removeprefix("aten::").rstrip("_")

    arguments = []
    written = set()
    for argument in schema.arguments:
        arguments.append(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.add(argument.name)
    return _Operation(name, arguments, written)


@dataclass(frozen=True)
class _Call:
    """One call of an operation."""

    func: Any
    op: _Operation
    inputs: list[tuple[str, Node]]
    scalars: dict[str, Any]
    kind: int

    def result(self, tensor: Tensor, order: int, output: int = 0, is_view: bool = False) -> Node:
        """Return a new node of the call, known to its inputs."""
        node = Node(
            op=self.op.name,
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            dtype=tensor.dtype,
            scalars=self.scalars,
            output=output,
            is_view=is_view,
            kind=self.kind,
            order=order,
            call=self.func,
        )
        for name, value in self.inputs:
            node.read(name, value)
        return node


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
        node = Node(op, tuple(tensor.shape), tensor.stride(), tensor.dtype, kind=kind)
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
        arguments = dict(zip(op.arguments, args, strict=False)) | kwargs
        tensors, scalars = _split_arguments(arguments)
        inputs = [(name, self.find(tensor)) for name, tensor in tensors]  # before a write
        call = _Call(func, op, inputs, scalars, _kind_of_result(op.name, inputs))

        has_fake = any(isinstance(tensor, FakeTensor) for _, tensor in tensors)
        with nullcontext() if has_fake else unset_fake_temporarily():
            out = func(*args, **kwargs)
        self._record(call, tensors, _tensors(out))
        return out

    def _record(
        self, call: _Call, tensors: list[tuple[str, Tensor]], results: list[Tensor]
    ) -> None:
        """Record the new tensors of a call, and those that it wrote."""
        read = set()
        written = {}
        for name, tensor in tensors:
            read.add(_storage(tensor))
            if name in call.op.written:
                written[id(tensor)] = name, tensor

        for i, tensor in enumerate(results):
            if id(tensor) in written:  # x.add_(y) returns x itself
                continue
            is_view = _storage(tensor) in read
            self._record_new(tensor, call.result(tensor, len(self.nodes), i, is_view))
        for name, tensor in written.values():
            self._record_write(tensor, call.result(tensor, len(self.nodes)), name)


def _kind_of_result(op: str, inputs: list[tuple[str, Node]]) -> int:
    """Return CONST, PARAM, INPUT or DATA for the result of `op`."""
    if op.startswith("new_") or op.endswith("_like"):
        return CONST
    if op in LOOKUPS:
        return DATA
    if op in CHOICES_OF_ROWS and _chooses_weights(inputs):
        return PARAM  # the weights of a selected expert are still weights
    kind = CONST
    for _, node in inputs:
        kind |= node.kind
    return kind


def _chooses_weights(inputs: list[tuple[str, Node]]) -> bool:
    """Return True for rows of a learned table that data select, but not the example alone."""
    (_, table), *indices = inputs
    kinds = {index.kind for _, index in indices}
    return table.is_learned and INPUT not in kinds


def _split_arguments(
    arguments: dict[str, Any],
) -> tuple[list[tuple[str, Tensor]], dict[str, Any]]:
    """Return (name, tensor) of the arguments, several for a list, and those without tensors."""
    named_tensors = []
    scalars = {}
    for name, value in arguments.items():
        tensors = _tensors(value)
        named_tensors += [(name, tensor) for tensor in tensors]
        if not tensors:
            scalars[name] = value
    return named_tensors, scalars


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.stride(), tensor.storage_offset()


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
        try:
            with tracer:
                out = model(*args, **kwargs)
        except ConfigError:  # a check of ours names its own remedy
            raise
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ConfigError(_reads_values(model, error)) from error
        except Exception as error:
            raise ConfigError(_failure(error)) from error
        outputs = set(map(tracer.find, _tensors(logits_of(out))))
    return Graph(tracer.nodes, parameters, outputs)


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
