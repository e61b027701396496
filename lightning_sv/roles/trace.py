"""Traced forward pass: a graph of torch operations, recorded without a change of the model.

A `TorchDispatchMode` records every operation below autograd: inside autograd functions, compiled or checkpointed
blocks, in-place writes and loops over data. It runs on real or on fake tensors (`FakeTensorMode`: shapes without
memory); values computed from real tensors only, such as positions, stay real next to fake parameters. Two
tensors are the same value if storage, offset, sizes and strides are equal; an in-place write gives its storage a
new value that depends on the old one.
"""

import heapq
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

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
from torch.utils._pytree import tree_iter, tree_map_only

from lightning_sv.errors import ConfigError
from lightning_sv.roles.ops import CHOICES_OF_ROWS, COPIES, LOOKUPS

#: dependence of a value: on neither, parameters, the example, or both
CONST, PARAM, INPUT, DATA = range(4)


@dataclass(slots=True, eq=False)
class Node:
    """One tensor of the pass."""

    op: str  #: operation that created it, 'mm' or 'namespace::name'; 'parameter', 'input' or 'buffer' for a source
    inputs: list[tuple[str, "Node"]]  #: (name of the argument, node) of each input tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype | None = None
    scalars: dict[str, Any] = field(default_factory=dict)  #: the operation's other arguments, by name
    output: int = 0  #: index among the operation's outputs
    is_view: bool = False  #: whether it shares the storage of its first input
    kind: int = CONST  #: CONST, PARAM, INPUT or DATA
    order: int = 0  #: position in the pass
    call: Any = None  #: the operation itself
    users: list[tuple[str, "Node"]] = field(default_factory=list)  #: (name of the argument, node) created from it

    @property
    def moves(self) -> bool:
        """True for a view or a copy: the values of its first input, at a different position or precision."""
        return self.is_view or self.op in COPIES

    @property
    def pointwise(self) -> bool:
        """True if torch tags the operation as pointwise."""
        return self.call is not None and torch.Tag.pointwise in self.call.tags

    def argument(self, name: str) -> "Node | None":
        """Return the input tensor of the argument `name`."""
        return next((node for argument, node in self.inputs if argument == name), None)

    def others(self, node: "Node") -> list["Node"]:
        """Return the input tensors except `node`."""
        return [other for _, other in self.inputs if other is not node]

    def is_alone(self, node: "Node", known: Collection["Node"] = ()) -> bool:
        """Return True if the operation combines `node` only with constants, parameters and `known` values."""
        return all(other.kind in (CONST, PARAM) or other in known for other in self.others(node))


class Walk:
    """Visit the users of a value, recursively as far as the caller follows.

    Attributes:
        seen: the value and the followed users
    """

    def __init__(self, start: Node) -> None:
        self.seen, self._waiting = {start}, [start]

    def __iter__(self) -> Iterator[tuple[Node, str, Node]]:
        """Yield (value, name of the argument, user) of each followed value."""
        while self._waiting:
            value = self._waiting.pop()
            yield from ((value, argument, user) for argument, user in value.users)

    def follow(self, user: Node) -> None:
        """Also visit the users of `user`, once."""
        if user not in self.seen:
            self.seen.add(user)
            self._waiting.append(user)


def users_in_order(values: Collection[Node]) -> Iterator[Node]:
    """Yield the users of `values` in the order of the pass, once each; also those of a user that the caller adds."""
    pending = [(user.order, user) for value in values for _, user in value.users]
    heapq.heapify(pending)
    last: Node | None = None
    while pending:
        _, user = heapq.heappop(pending)
        if user is last or user in values:
            continue
        yield (last := user)
        for _, following in user.users if user in values else ():
            heapq.heappush(pending, (following.order, following))


class Graph(NamedTuple):
    """Nodes in the order of the pass, parameters by name, and the outputs that define the model's function."""

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
        node = _node(tensor, op, [], kind={"parameter": PARAM, "input": INPUT}.get(op, CONST))
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
        op, kwargs = _operation(func), kwargs or {}
        if not op.recorded:
            return func(*args, **kwargs)
        arguments = dict(zip(op.arguments, args, strict=False)) | kwargs
        tensors = {name: values for name, value in arguments.items() if (values := _tensors(value))}
        inputs = [(name, self.find(t)) for name, values in tensors.items() for t in values]
        written = [(name, t) for name in op.written for t in tensors.get(name, ())]
        before = {_storage(t) for values in tensors.values() for t in values}
        real = not any(isinstance(t, FakeTensor) for values in tensors.values() for t in values)
        with unset_fake_temporarily() if real else nullcontext():  # operations on values stay real
            out = func(*args, **kwargs)
        common = {
            "scalars": {name: value for name, value in arguments.items() if name not in tensors},
            "kind": _kind_of_result(op.name, inputs),
            "call": func,
        }

        def node(tensor: Tensor, **position: Any) -> Node:
            result = _node(tensor, op.name, list(inputs), order=len(self.nodes), **common, **position)
            for name, source in inputs:
                source.users.append((name, result))
            return result

        for i, tensor in enumerate(_tensors(out)):
            if not any(tensor is target for _, target in written):
                self._put(tensor, node(tensor, output=i, is_view=_storage(tensor) in before))
        for name, tensor in written:
            self._write(tensor, node(tensor), name)
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


class _Operation(NamedTuple):
    name: str
    arguments: tuple[str, ...]
    written: tuple[str, ...]
    recorded: bool


@cache
def _operation(func: Any) -> _Operation:
    namespace, _, name = func._schema.name.partition("::")
    arguments = func._schema.arguments
    return _Operation(
        name.rstrip("_") if namespace == "aten" else func._schema.name,
        tuple(argument.name for argument in arguments),
        tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write),
        namespace != "prim",  # prim operations query a device or a size
    )


def _node(tensor: Tensor, op: str, inputs: list[tuple[str, Node]], **attributes: Any) -> Node:
    return Node(op, inputs, tuple(tensor.shape), _strides(tensor), tensor.dtype, **attributes)


def _kind_of_result(op: str, inputs: list[tuple[str, Node]]) -> int:
    """Return CONST, PARAM, INPUT or DATA for the result of `op`."""
    if op.startswith(("new_", "empty", "sym_")) or op.endswith("_like"):
        return CONST
    if op in LOOKUPS:
        return DATA
    first = next((node.kind for name, node in inputs if name == "self"), CONST)
    if op in CHOICES_OF_ROWS and first == PARAM and all(node.kind != INPUT for _, node in inputs):
        return PARAM  # the weights of a selected expert are still weights
    kinds = {node.kind for _, node in inputs}
    return DATA if {PARAM, INPUT} <= kinds else max(kinds, default=CONST)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> Any:
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # a subclass without storage
        return tensor


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.stride()) if tensor.layout == torch.strided else ()


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    strided = tensor.layout == torch.strided
    return (tuple(tensor.shape), _strides(tensor), tensor.storage_offset() if strided else 0, tensor.dtype)


@contextmanager
def tracing_state(model: nn.Module) -> Iterator[None]:
    """Set eval mode with gradients and without autocast or compiled code; restore everything afterwards.

    A module that replaced or added a buffer, such as a cache, also gets its attributes back, because some describe the
    buffer. Other attributes stay: in one of them transformers records that its hooks are registered.
    """
    before = [(m, m.training, dict(vars(m)), dict(m._buffers)) for m in model.modules()]
    values = [(buffer, buffer.clone()) for buffer in model.buffers() if not isinstance(buffer, FakeTensor)]
    devices = {"cpu", *(p.device.type for p in model.parameters())} - {"meta"}
    try:
        for module, *_ in before:
            module.training = False
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            # nn.Embedding(max_norm=...) changes its table in each pass
            stack.enter_context(patch.object(torch, "embedding_renorm_", lambda table, *_: table))
            for device in sorted(devices):
                stack.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        with torch.no_grad():
            for buffer, value in values:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
        for module, training, attributes, buffers in before:
            module.training = training
            now = module._buffers
            if list(now) != list(buffers) or any(now[name] is not buffer for name, buffer in buffers.items()):
                for name in vars(module).keys() - attributes.keys():
                    del vars(module)[name]
                vars(module).update(attributes)
                module._buffers.clear()
                module._buffers.update(buffers)


def copied(example: Any) -> Any:
    """Return an example with copies of its tensors, because models can write into their inputs."""
    copies: dict[int, Tensor] = {}  # the same tensor stays the same, because attention compares its inputs

    def copy(tensor: Tensor) -> Tensor:
        if any(step == 0 and size > 1 for step, size in zip(_strides(tensor), tensor.shape, strict=False)):
            return tensor  # expanded: torch refuses writes, and a copy would need the memory
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return copies[id(tensor)]

    with torch.inference_mode(False), unset_fake_temporarily():
        return tree_map_only(Tensor, copy, example)


def run_method(model: nn.Module, method: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a method of the model under the conditions of a traced pass."""
    with _conditions(model), Tracer():
        return method(**kwargs)


@contextmanager
def _conditions(model: nn.Module) -> Iterator[None]:
    """Apply `tracing_state` without kernels for complete layers, in the parameters' fake mode if any."""
    fake = next((p.fake_mode for p in model.parameters() if isinstance(p, FakeTensor)), None)
    log = logging.getLogger("torch._subclasses.fake_tensor")  # logs tracebacks of caught exceptions
    unchanged = {"deterministic": None, "allow_tf32": None, "fp32_precision": None}
    with ExitStack() as stack:
        stack.enter_context(patch.object(log, "disabled", True))
        stack.enter_context(tracing_state(model))
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False, **unchanged))
        stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        stack.enter_context(fake or nullcontext())
        yield


def trace(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Graph:
    """Run `model(*args, **kwargs)` once and return its graph; mode, buffers and the CPU's random state are restored."""
    tracer = Tracer()
    args, kwargs = copied((args, dict(kwargs)))
    with _conditions(model):
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
            why = f"{type(model).__name__} reads a tensor's values in its forward pass ({error.func})"
            hint = "Build the model with its weights, and pass it to weight_decay_roles in Python."
            raise ConfigError(f"{why}, and a fake tensor has none; expected a model that does not. {hint}") from error
        except Exception as error:
            why = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"the traced forward pass failed ({type(error).__name__}: {why}); expected an example that the "
                "model accepts (a dict has the keywords of forward; give a dict that is its only argument as (dict,)), "
                "and a model without flex_attention, torch.cond and other higher-order operators. In transformers, "
                'call model.set_attn_implementation("sdpa") first. A model that needs autocast must enter it itself.'
            ) from error
        outputs = {tracer.find(tensor) for tensor in _tensors(logits_of(out))}
    return Graph(tracer.nodes, parameters, outputs)


def plain_output(out: Any) -> Any:
    """Convert dataclasses and mappings to dicts and lists, recursively, for torch's tree functions."""
    if isinstance(out, Mapping):
        return {key: plain_output(value) for key, value in out.items()}
    if is_dataclass(out) and not isinstance(out, type):
        return {field.name: plain_output(getattr(out, field.name)) for field in fields(out)}
    if isinstance(out, (list, tuple)):
        return [plain_output(value) for value in out]
    return out


def logits_of(out: Any) -> Any:
    """Return a model's logits, or all its outputs if none are called logits, as `plain_output` does."""
    plain = plain_output(out)
    return plain["logits"] if isinstance(plain, dict) and "logits" in plain else plain
