"""Memory of one optimizer step, measured on tensors without storage, and its share of one GPU."""

import weakref
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_sv.errors import ConfigError, expect
from lightning_sv.nn import document_ids, router_loss
from lightning_sv.optim import build_optimizer
from lightning_sv.scale.fast.eager import unchunked
from lightning_sv.settings.data import divisors
from lightning_sv.settings.model import PretrainConfig

#: fraction of a GPU's memory available to tensors; the CUDA context, NCCL and fragmentation use the rest
USABLE = 0.9
STRATEGIES = ("single", "ddp", "fsdp")


class AllocatedBytes(TorchDispatchMode):
    """Count the bytes of live storages returned by operators: `now` and `peak`.

    torch.distributed's MemTracker counts the same per module, but takes twelve times as long on Llama-1B. Memory that a
    kernel allocates and frees inside one operator is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, Any] = {}

    def add(self, tensor: Tensor) -> None:
        """Count the tensor's storage until it is freed; each storage counts once."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            size = storage.nbytes()
            self._alive[key] = weakref.finalize(storage, self._freed, key, size)
            self.now += size
            self.peak = max(self.peak, self.now)

    def _freed(self, key: int, size: int) -> None:
        self.now -= size
        del self._alive[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return out


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

    The step contains loss, backward, clipping and optimizer in Lightning's order: the old gradients exist during
    forward, and with `accumulate`, for several micro-batches, during backward too. Routing does not matter, because the
    experts' buffer has a fixed size. `precision` is '32-true' or 'bf16-mixed'.
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
    state = sum(value.nbytes for value in optimizer.state[parameter].values() if isinstance(value, Tensor))
    return Held(len(parameter), parameter.nbytes, 0 if parameter.grad is None else parameter.grad.nbytes, state)


class Parallel(NamedTuple):
    """Distribution of a step over GPUs.

    Args:
        kind: one of `STRATEGIES`
        bucket_view: under ddp, gradients are views of the buckets (gradient_as_bucket_view)
        keep_gathered: under fsdp, weights stay gathered through the micro-batches of a step
        replicas: under fsdp, copies of the model, each sharded over gpus / replicas
    """

    kind: str
    bucket_view: bool = False
    keep_gathered: bool = False
    replicas: int = 1


@dataclass(frozen=True)
class GpuMemory:
    """Memory of one GPU at the peak of a step, in bytes.

    Attributes:
        weights: parameters and buffers, or this GPU's shard
        gradients: gradients, or this GPU's shard, that exist at the peak
        optimizer: optimizer state
        communication: DDP's buckets, or FSDP's gathered weights and unreduced gradients
        activations: saved activations and temporaries
    """

    weights: int
    gradients: int
    optimizer: int
    communication: int
    activations: int

    @property
    def peak(self) -> int:
        """Total memory."""
        return sum(asdict(self).values())


def gpu_memory(
    step: StepMemory, blocks: nn.ModuleList, parallel: Parallel, gpus: int, *, accumulate: bool = False
) -> GpuMemory:
    """Return the memory of one GPU; `blocks` are the units that FSDP gathers.

    With `accumulate`, for several micro-batches, gradients exist during forward. DDP keeps its buckets in addition to
    the gradients unless these are views of them; for FSDP2 see `_fully_sharded`.
    """
    gpus //= parallel.replicas
    if parallel.kind != "fsdp" or gpus == 1:
        weights, gradients, optimizer = step.parts()
        buckets = gradients if parallel.kind == "ddp" and not parallel.bucket_view else 0
        return GpuMemory(weights, gradients, optimizer, buckets, step.activations)
    return _fully_sharded(step, blocks, gpus, accumulate, parallel.keep_gathered)


def _fully_sharded(
    step: StepMemory, blocks: nn.ModuleList, gpus: int, accumulate: bool, keep_gathered: bool
) -> GpuMemory:
    """Return the memory under FSDP2: sharded state plus the largest of three moments of backward.

    A block (all blocks with keep_gathered) is gathered in float32, because autocast casts later; the parameters outside
    blocks (embedding, head) stay gathered. At the start of backward, memory contains all activations, gathered weights
    and the head's gradient; in the middle a block's gradient, the next gathered block and a gradient in reduction;
    at the end the gradients of embedding and head, and their copy in reduction. Derived from FSDP2's
    buffers, and checked against the peak of real steps on two gloo processes (tests/plan/test_sharded.py, within 10%).
    """
    weights, gradients, optimizer = step.parts(gpus)
    sizes = [sum(parameter.nbytes for parameter in block.parameters()) for block in blocks]
    weights_of_all, gradients_of_all, _ = step.parts()
    root, block = weights_of_all - step.buffers - sum(sizes), max(sizes)
    shards = round(gradients * sum(sizes) / (root + sum(sizes)))  # the blocks' part
    gathered, prefetched = (sum(sizes), 0) if keep_gathered else (block, block)
    # When a step has several micro-batches, its gradients are unsharded until the last one.
    before, during, unreduced = (gradients_of_all, gradients_of_all, 0) if accumulate else (0, shards, root)
    moments = [
        (before, root + root // 2 + gathered, step.activations),
        (during, root + unreduced + gathered + prefetched + 2 * block, step.activations // len(sizes)),
        (during, 2 * root + unreduced, 0),
    ]
    gradients, communication, activations = max(moments, key=sum)
    return GpuMemory(weights, gradients, optimizer, communication, activations)


def largest_micro_batch(peak: Callable[[int], int], share: int, limit: int, most: int | None = None) -> int | None:
    """Return the largest divisor of `share`, up to `most`, whose peak is within `limit`; None if there is none.

    `peak` returns bytes of a micro-batch. Bisection, because memory grows with the micro-batch, though not in
    proportion (the loss is chunked). The full share is tried first, because it needs no accumulated gradients and may
    take less memory than half of it.
    """
    sizes = [size for size in divisors(share) if size <= (most or share)]
    if peak(sizes[-1]) <= limit:
        return sizes[-1]
    fitting = bisect_right(sizes[:-1], limit, key=peak)
    return sizes[fitting - 1] if fitting else None


def find_strategy(trainer: dict[str, Any], gpus: int) -> Parallel:
    """Parse trainer.strategy, a name or a class with its arguments."""
    spec = trainer.get("strategy") or "auto"
    options: dict[str, Any] = {}
    if not isinstance(spec, str):
        spec = dict(spec)
        spec, options = spec["class_path"], dict(spec.get("init_args") or {})
    name = spec.rpartition(".")[2].lower()
    if name == "auto" or "single" in name or "ddp" in name:
        return Parallel("single" if gpus == 1 else "ddp", bucket_view=bool(options.get("gradient_as_bucket_view")))
    if "sharded" in name:  # FullyShardedStrategy; Lightning's own "fsdp" is not supported
        replicas = int(options.get("replicas") or 1)
        divides = replicas >= 1 and gpus % replicas == 0
        expect(divides, "trainer.strategy.init_args.replicas", replicas, f"a divisor of {gpus}, the number of GPUs.")
        return Parallel("fsdp", keep_gathered=bool(options.get("keep_gathered")), replicas=replicas)
    wanted = f"auto, ddp or lightning_sv.lit.fsdp.FullyShardedStrategy. Or pass --strategy {' or '.join(STRATEGIES)}."
    raise ConfigError(f"trainer.strategy is {spec!r}; expected {wanted}")
