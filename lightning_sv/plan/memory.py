"""Memory of one optimizer step, measured on tensors without storage."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_sv.nn import document_ids, router_loss
from lightning_sv.nn.allocated import AllocatedBytes
from lightning_sv.optim import build_optimizer
from lightning_sv.scale.eager import unchunked
from lightning_sv.settings.model import PretrainConfig


class Held(NamedTuple):
    """Memory of one parameter between two steps, in bytes; `rows` is the length of its first axis."""

    rows: int
    weight: int
    gradient: int
    optimizer: int


@dataclass(frozen=True)
class StepMemory:
    """Memory of one device with the full model, in a step after the first, in bytes.

    Attributes:
        held: memory of every parameter
        buffers: memory of the model's buffers
        activations: rest at the peak: saved activations and temporaries
    """

    held: tuple[Held, ...]
    buffers: int
    activations: int

    def parts(self, shards: int = 1) -> tuple[int, int, int]:
        """Return (weights, gradients, optimizer), sharded along first axes, with uneven shards rounded up."""
        shares = [(-(-one.rows // shards) / one.rows, one) for one in self.held]
        weights = self.buffers + round(sum(share * one.weight for share, one in shares))
        gradients = round(sum(share * one.gradient for share, one in shares))
        return weights, gradients, round(sum(share * one.optimizer for share, one in shares))


def step_memory(
    run: PretrainConfig, micro_batch: int, seq_len: int, *, precision: str = "32-true", accumulate: bool = False
) -> StepMemory:
    """Return the memory of one training step in eager mode; the compiler needs less, because it recomputes.

    The step contains loss, backward, clipping and optimizer in Lightning's order: the old gradients
    exist during forward, and with accumulation during backward too. Routing does not matter, because
    the experts' buffer has a fixed size.

    Args:
        run: settings of the model and its training
        micro_batch: sequences per forward pass
        seq_len: predicted tokens per sequence
        precision: trainer.precision, '32-true' or 'bf16-mixed'
        accumulate: if True, a step has several micro-batches
    """
    counter = AllocatedBytes()
    net = run.meta()  # outside the mode, in which parameters could not change their device
    with FakeTensorMode(allow_non_fake_inputs=True), counter, unchunked():
        net = net.to_empty(device="cpu")
        net.activation_checkpointing = run.activation_checkpointing
        net.narrow_residual = run.residual == "narrow"
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
            loss = nats + router_loss(routings, run.backbone)
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
