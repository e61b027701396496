"""Activations of a compiled step: what the compiler keeps between forward and backward.

torch's min-cut partitioner decides which results of a block stay in memory and which backward
computes again; Inductor uses it with the same settings. One block is traced with it on fake
tensors, because all blocks are equal. The peak is at the end of forward, in the chunks of the loss:

    activations = (n_layer + 1) residual streams + n_layer (kept by a block) + peak of the head

With activation checkpointing a block's results exist only while it is computed again.
Inductor's own allocations for an H100 agree (benchmarks/TRIED.md), and so do the peaks recorded on
one (tests/plan/test_compiled_memory.py). `model.compile: model` is planned as `block`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from functorch.compile import (  # type: ignore[import-untyped]
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node

from lightning_sv.nn.rope import rope_tables
from lightning_sv.plan.allocated_bytes import AllocatedBytes
from lightning_sv.scale.fast.eager import unchunked
from lightning_sv.settings.model import PretrainConfig


@dataclass(frozen=True)
class KeptByBlock:
    """Bytes that one compiled block keeps for backward.

    Attributes:
        constant: casts and folds of weights
        per_sequence: results that depend on the tokens, per sequence
        residual: the residual stream before the block, per sequence
    """

    constant: int
    per_sequence: int
    residual: int


class CompiledActivations:
    """Bytes of activations as a function of the micro-batch; a block is traced once.

    Args:
        run: settings of the model
        seq_len: tokens per sequence
        precision: '32-true' or 'bf16-mixed'
    """

    def __init__(self, run: PretrainConfig, seq_len: int, precision: str):
        self.run = run
        self.seq_len = seq_len
        self.autocast = precision == "bf16-mixed"
        self.block = self._trace_block()

    def peak(self, micro_batch: int) -> int:
        """Return the activations at the end of forward, or of a recomputed block."""
        n_layer = self.run.backbone.n_layer
        block = self.block
        residuals = (n_layer + 1) * micro_batch * block.residual
        kept = block.constant + micro_batch * block.per_sequence
        head = self._head_peak(micro_batch)
        if self.run.activation_checkpointing:
            return residuals + max(kept, head)
        return residuals + n_layer * kept + head

    def _trace_block(self) -> KeptByBlock:
        graphs: list[GraphModule] = []
        record = _recorder(graphs)
        backend = aot_autograd(
            fw_compiler=record,
            bw_compiler=record,
            partition_fn=min_cut_rematerialization_partition,
        )
        torch.compiler.reset()
        net = self.run.plan.meta()
        with FakeTensorMode(allow_non_fake_inputs=True), unchunked():
            block = net.layers[0].to_empty(device="cpu")
            x = self._residual_stream(micro_batch=1)
            config = self.run.backbone
            rope = rope_tables(self.seq_len, config.head_width, config.rope_theta, x)
            compiled = torch.compile(block.forward, dynamic=False, backend=backend)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                y, routing = compiled(x, rope)
            y.sum().backward()
        n_results = 1 if routing is None else 1 + len(routing)
        forward = graphs[0]
        return _kept_bytes(forward, n_results, x)

    def _residual_stream(self, micro_batch: int) -> Tensor:
        is_narrow = self.autocast and self.run.residual == "narrow"
        dtype = torch.bfloat16 if is_narrow else torch.float32
        shape = micro_batch, self.seq_len, self.run.backbone.d_model
        return torch.empty(shape, dtype=dtype, requires_grad=True)

    def _head_peak(self, micro_batch: int) -> int:
        """Return the peak of norm, lm_head and loss, in the chunks of compiled code on a GPU.

        The size of a chunk depends on the device in compiled code too. The smaller chunks of a CPU
        would divide the peak of `mini` by 5 (64 x 1,024 tokens), so `unchunked` is needed.
        """
        torch.compiler.reset()
        net = self.run.plan.meta()
        counter = _FusedBytes()
        with FakeTensorMode(allow_non_fake_inputs=True), unchunked():
            head = net.head.to_empty(device="cpu")
            x = self._residual_stream(micro_batch)
            targets = torch.zeros(x.shape[:2], dtype=torch.long)
            # This backend runs the captured graph one operation at a time, so that the counter sees
            # each allocation. Inductor would replace them by its own.
            compiled: Any = torch.compile(head.forward, dynamic=False, backend="eager")
            with counter, torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                compiled(x, targets)
        return counter.peak


class _FusedBytes(AllocatedBytes):
    """Allocated bytes without casts to float32, which compiled code makes inside its kernels."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        is_copy = func is torch.ops.aten._to_copy.default
        if is_copy and options.get("dtype") == torch.float32:
            return func(*args, **options)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _recorder(graphs: list[GraphModule]) -> Callable[[GraphModule, Any], Any]:
    """Return a compiler that records graphs of forward and backward, and runs them unchanged."""

    def record(graph: GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    return record


def _kept_bytes(forward: GraphModule, n_results: int, x: Tensor) -> KeptByBlock:
    """Return the bytes of the outputs of `forward` after its results, which are kept for backward.

    Inputs are not counted, and views of one tensor are counted once. Only what is computed from
    `x`, the input of that shape, grows with the micro-batch.
    """
    of_tokens = _computed_from(forward, x.shape)
    outputs: Any = forward.graph.output_node().args[0]
    kept = {_base(node) for node in outputs[n_results:] if isinstance(node, Node)}
    constant = 0
    per_sequence = 0
    for node in kept:
        if node.op == "placeholder":
            continue
        if node in of_tokens:
            per_sequence += _nbytes(node)
        else:
            constant += _nbytes(node)
    return KeptByBlock(constant, per_sequence, x.nbytes)


def _computed_from(graph: GraphModule, shape: torch.Size) -> set[Node]:
    """Return the inputs of this shape, and everything computed from them."""
    nodes: set[Node] = set()
    for node in graph.graph.nodes:
        is_input = node.op == "placeholder" and node.meta["val"].shape == shape
        if is_input or not nodes.isdisjoint(node.all_input_nodes):
            nodes.add(node)
    return nodes


def _base(node: Node) -> Node:
    """Return the node that owns the memory of a view."""
    while getattr(node.target, "is_view", False):
        node = node.all_input_nodes[0]
    return node


def _nbytes(node: Node) -> int:
    value = node.meta["val"]
    return value.nbytes if isinstance(value, Tensor) else 0
