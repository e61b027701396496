"""Memory of one optimizer step, found by running the step on tensors that have shapes and no storage."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_sv.nn import Backbone, document_ids, router_loss
from lightning_sv.nn.allocated import AllocatedBytes
from lightning_sv.nn.cross_entropy import CHUNK
from lightning_sv.optim import build_optimizer
from lightning_sv.scale.row_chunks import CHUNK_ELEMENTS, unchunked
from lightning_sv.settings.model import PretrainConfig


class Held(NamedTuple):
    """What one parameter holds between two steps, in bytes; `rows` is the length of its first axis."""

    rows: int
    weight: int
    gradient: int
    optimizer: int


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one device that holds the whole model, in a step after the first.

    Attributes:
        held: of every parameter
        buffers: of the model
        activations: the rest at the peak: what backward needs, and temporaries
    """

    held: tuple[Held, ...]
    buffers: int
    activations: int

    def parts(self, shards: int = 1) -> tuple[int, int, int]:
        """Return (weights, gradients, optimizer), each parameter cut along its first axis, uneven cuts rounded up."""
        shares = [(-(-one.rows // shards) / one.rows, one) for one in self.held]
        weights = self.buffers + round(sum(share * one.weight for share, one in shares))
        gradients = round(sum(share * one.gradient for share, one in shares))
        return weights, gradients, round(sum(share * one.optimizer for share, one in shares))

    @property
    def peak(self) -> int:
        """Most bytes allocated at a time."""
        return sum(self.parts()) + self.activations


def step_memory(
    run: PretrainConfig, micro_batch: int, seq_len: int, *, precision: str = "32-true", accumulate: bool = False
) -> StepMemory:
    """Return the memory of one training step in eager mode; the compiler needs less, as it recomputes.

    The step is the module's loss, backward, clipping and the optimizer, in Lightning's order: the old gradients
    live through the forward pass, and with accumulation through backward as well. Routing is not looked at:
    the experts' buffer has one size whatever they get.

    Args:
        run: what is trained
        micro_batch: sequences at once
        seq_len: tokens a sequence predicts
        precision: trainer.precision, '32-true' or 'bf16-mixed'
        accumulate: whether a step has several micro-batches
    """
    counter = AllocatedBytes()
    with fake_backbone(run) as net, counter, unchunked(CHUNK_ELEMENTS, CHUNK):
        for tensor in (*net.parameters(), *net.buffers()):
            counter.add(tensor)
        optimizer = build_optimizer(run.parameter_groups(net), run.optim, run.lr)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.empty_like(parameter)
        optimizer.step()  # creates the state
        held = tuple(_held(parameter, optimizer) for parameter in net.parameters())
        between = counter.peak = counter.now
        block = torch.zeros(micro_batch, seq_len + 1, dtype=torch.long)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            tokens = block[:, :-1]
            documents = document_ids(tokens, 0) if run.mask_documents else None
            nats, routings = net(tokens, documents, targets=block[:, 1:], with_routing=True)
            loss = nats + router_loss(routings, run.config)
        if not accumulate:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=True)
        optimizer.step()
        return StepMemory(held, sum(buffer.nbytes for buffer in net.buffers()), counter.peak - between)


def _held(parameter: Tensor, optimizer: torch.optim.Optimizer) -> Held:
    gradient = 0 if parameter.grad is None else parameter.grad.nbytes
    state = sum(value.nbytes for value in optimizer.state[parameter].values() if isinstance(value, Tensor))
    return Held(len(parameter), parameter.nbytes, gradient, state)


@contextmanager
def fake_backbone(run: PretrainConfig) -> Iterator[Backbone]:
    """Yield the backbone without storage, in a mode in which operators compute shapes alone."""
    # On the meta device outside the mode: parameters made inside cannot change their device.
    net = run.meta()
    with FakeTensorMode(allow_non_fake_inputs=True):
        net = net.to_empty(device="cpu")
        net.activation_checkpointing = run.activation_checkpointing
        net.narrow_residual = run.residual == "narrow"
        yield net
