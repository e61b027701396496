"""What one GPU holds under a strategy, and the largest micro-batch that it takes."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from torch import nn

from lightning_sv.errors import ConfigError
from lightning_sv.plan.memory import StepMemory

#: share of a GPU's memory that tensors may take; the CUDA context, NCCL and fragmentation need the rest
USABLE = 0.9
STRATEGIES = ("single", "ddp", "fsdp")


class Parallel(NamedTuple):
    """How a step is spread over GPUs.

    Args:
        kind: one of `STRATEGIES`
        bucket_view: under ddp, gradients are views of the buckets (gradient_as_bucket_view)
        keep_gathered: under fsdp, weights stay whole through the micro-batches of a step
        replicas: under fsdp, copies of the model, each sharded over gpus / replicas
    """

    kind: str
    bucket_view: bool = False
    keep_gathered: bool = False
    replicas: int = 1


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of one GPU at the peak of a step.

    Attributes:
        weights: parameters and buffers, or its shard of them
        gradients: likewise, as far as they are there at that moment
        optimizer: bytes of its state
        communication: DDP's buckets, or what FSDP has gathered and not yet scattered
        activations: what backward needs, and temporaries
    """

    weights: int
    gradients: int
    optimizer: int
    communication: int
    activations: int

    @property
    def peak(self) -> int:
        """Their sum."""
        return sum(asdict(self).values())


def gpu_memory(
    step: StepMemory, blocks: nn.ModuleList, parallel: Parallel, gpus: int, *, accumulate: bool = False
) -> GpuMemory:
    """Return what one GPU holds.

    DDP keeps its buckets beside the gradients unless these are views of them; FSDP2 see `_fully_sharded`.

    Args:
        step: of the whole model
        blocks: the units that FSDP gathers
        parallel: how the step is spread
        gpus: number of GPUs
        accumulate: whether a step has several micro-batches, so that gradients are there when one begins
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
    """FSDP2: weights, gradients and optimizer state are cut, the rest is the largest of three moments of backward.

    A block (all of them with keep_gathered) is gathered in float32, as autocast casts it later; what belongs to no
    block (embedding, head) is whole throughout. At the start of backward there are all activations, what is gathered
    and the gradient of the head; in the middle a block's gradient, the next block on its way and a gradient being
    scattered; at the end the gradients of embedding and head, and a copy of them being scattered. Counted from FSDP2's
    buffers, and checked against the peak of real steps on two gloo processes (tests/plan/test_sharded.py holds 10%).
    """
    weights, gradients, optimizer = step.parts(gpus)
    sizes = [sum(parameter.nbytes for parameter in block.parameters()) for block in blocks]
    root, block = step.parts()[0] - step.buffers - sum(sizes), max(sizes)
    shards = round(gradients * sum(sizes) / (root + sum(sizes)))  # of the blocks' gradients
    if keep_gathered:
        here, coming = sum(sizes), 0
    else:
        here, coming = block, block
    moments = [
        (0, root + root // 2 + here, step.activations),
        (shards, 2 * root + here + coming + 2 * block, step.activations // len(sizes)),
        (shards, 3 * root, 0),
    ]
    if accumulate:  # gradients are whole until the step's last micro-batch, those of embedding and head too
        whole = step.parts()[1]
        moments = [
            (whole, root + root // 2 + here, step.activations),
            (whole, root + here + coming + 2 * block, step.activations // len(sizes)),
            (whole, 2 * root, 0),
        ]
    held, communication, activations = max(moments, key=sum)
    return GpuMemory(weights, held, optimizer, communication, activations)


def largest_micro_batch(peak: Callable[[int], int], share: int, limit: int, most: int | None = None) -> int | None:
    """Return the largest divisor of `share`, up to `most`, whose peak is within `limit`; None if there is none.

    By bisection: a larger micro-batch takes more, but not in proportion, as the loss is made in chunks; the whole share
    at once, which needs no sums of gradients, may take less than half of it, and comes first.

    Args:
        peak: bytes at a micro-batch
        share: sequences of one GPU in a step
        limit: bytes that the peak may take
        most: bound of the answer; None for no bound
    """
    divisors = [size for size in range(1, min(share, most or share) + 1) if share % size == 0]
    if peak(divisors[-1]) <= limit:
        return divisors[-1]
    fitting = bisect_right(divisors[:-1], limit, key=peak)
    return divisors[fitting - 1] if fitting else None


def find_strategy(trainer: dict[str, Any], gpus: int) -> Parallel:
    """Read trainer.strategy, a name or a class with its arguments.

    Raises:
        ConfigError: it is none of `STRATEGIES`, or its replicas do not divide the GPUs
    """
    given = trainer.get("strategy") or "auto"
    options: dict[str, Any] = {}
    if not isinstance(given, str):
        given = dict(given)
        given, options = given["class_path"], dict(given.get("init_args") or {})
    name = given.rpartition(".")[2].lower()
    if name == "auto" or "single" in name:
        return Parallel("single" if gpus == 1 else "ddp")
    if "ddp" in name:
        return Parallel("single" if gpus == 1 else "ddp", bucket_view=bool(options.get("gradient_as_bucket_view")))
    if "fsdp" in name or "modelparallel" in name or "sharded" in name:
        replicas = int(options.get("replicas") or 1)
        if replicas < 1 or gpus % replicas:
            raise ConfigError(
                f"trainer.strategy.init_args.replicas is {replicas}; expected a divisor of {gpus}, the number of GPUs."
            )
        return Parallel("fsdp", keep_gathered=bool(options.get("keep_gathered")), replicas=replicas)
    raise ConfigError(f"trainer.strategy {given!r} is not planned for; give --strategy {' or '.join(STRATEGIES)}.")
