"""Memory of one optimizer step on one device, measured on tensors without storage.

    peak = weights + gradients + optimizer state + activations

The first three follow from the shapes of the parameters. Activations do not: what autograd saves
depends on the strategy, the norm, the experts, the precision and the chunks of the loss. A formula
would need a term for each of them, and one more for each change of a kernel. So the step itself
runs, on fake tensors (shapes without data), and its allocations are counted.
The result is within 1% of torch's allocator in real steps on a CPU (tests/plan/test_memory.py).
Activations of compiled steps are in compiled_memory.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from lightning_sv.nn import Backbone, document_ids, router_loss
from lightning_sv.optim import build_optimizer
from lightning_sv.plan.allocated_bytes import AllocatedBytes
from lightning_sv.scale.fast.eager import unchunked
from lightning_sv.settings.model import PretrainConfig


class Held(NamedTuple):
    """Bytes of one parameter between two steps; `rows` is the length of its first axis."""

    rows: int
    weight: int
    gradient: int
    optimizer: int


class StateBytes(NamedTuple):
    """Bytes that a device, or one of several shards, holds between two steps."""

    weights: int  #: parameters and buffers
    gradients: int
    optimizer: int


@dataclass(frozen=True)
class StepMemory:
    """Memory of one device with the full model, in a step after the first, in bytes.

    Attributes:
        activations: rest at the peak: saved activations and temporaries
    """

    held: tuple[Held, ...]
    buffers: int
    activations: int

    def parts(self, shards: int = 1) -> StateBytes:
        """Return the bytes of the largest shard; buffers are not sharded.

        Parameters are cut along their first axis, and one device has the part that is rounded up.
        """
        weights = 0.0
        gradients = 0.0
        optimizer = 0.0
        for parameter in self.held:
            rows_of_shard = math.ceil(parameter.rows / shards)
            share = rows_of_shard / parameter.rows
            weights += share * parameter.weight
            gradients += share * parameter.gradient
            optimizer += share * parameter.optimizer
        return StateBytes(self.buffers + round(weights), round(gradients), round(optimizer))


def step_memory(
    run: PretrainConfig,
    micro_batch: int,
    seq_len: int,
    *,
    precision: str = "32-true",
    accumulate: bool = False,
) -> StepMemory:
    """Return the memory of one training step in eager mode.

    The step contains loss, backward, clipping and optimizer in Lightning's order: the old gradients
    exist during forward, and with `accumulate`, for several micro-batches, during backward too.
    Routing does not matter, because the experts' buffer has a fixed size. `precision` is '32-true'
    or 'bf16-mixed'.
    """
    counter = AllocatedBytes()
    net = run.plan.meta()  # outside the mode, in which parameters could not change their device
    with FakeTensorMode(allow_non_fake_inputs=True), counter, unchunked():
        net = net.to_empty(device="cpu")
        net.activation_checkpointing = run.activation_checkpointing
        net.narrow_residual = run.residual == "narrow"
        for tensor in (*net.parameters(), *net.buffers()):
            counter.add(tensor)
        optimizer = _stepped_optimizer(net, run)
        held = _held(net, optimizer)
        between_steps = counter.now

        counter.peak = between_steps
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = _loss(net, run, micro_batch, seq_len)
        if not accumulate:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=True)
        optimizer.step()
        return StepMemory(held, _buffers(net), counter.peak - between_steps)


def memory_between_steps(run: PretrainConfig) -> StepMemory:
    """Return the memory of a model between two steps, without activations."""
    net = run.plan.meta()
    with FakeTensorMode(allow_non_fake_inputs=True):
        net = net.to_empty(device="cpu")
        optimizer = _stepped_optimizer(net, run)
        return StepMemory(_held(net, optimizer), _buffers(net), activations=0)


def _stepped_optimizer(net: Backbone, run: PretrainConfig) -> Optimizer:
    """Return the optimizer after a step, so that its state and all gradients exist."""
    optimizer = build_optimizer(run.plan.parameter_groups(net), run.optim, run.plan.lr)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    return optimizer


def _loss(net: Backbone, run: PretrainConfig, micro_batch: int, seq_len: int) -> Tensor:
    block = torch.zeros(micro_batch, seq_len + 1, dtype=torch.long)  # B T+1
    tokens = block[:, :-1]
    documents = document_ids(tokens, 0) if run.mask_documents else None
    nats, routings = net(tokens, documents, targets=block[:, 1:], with_routing=True)
    loss: Tensor = nats + router_loss(routings, run.backbone)
    return loss


def _buffers(net: Backbone) -> int:
    return sum(buffer.nbytes for buffer in net.buffers())


def _held(net: Backbone, optimizer: Optimizer) -> tuple[Held, ...]:
    held = []
    for parameter in net.parameters():
        gradient = 0 if parameter.grad is None else parameter.grad.nbytes
        state = 0
        for value in optimizer.state[parameter].values():
            if isinstance(value, Tensor):
                state += value.nbytes
        held.append(Held(len(parameter), parameter.nbytes, gradient, state))
    return tuple(held)
