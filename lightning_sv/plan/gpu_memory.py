"""Memory of one GPU at the peak of a distributed step, derived from that of a single device.

DDP keeps everything, and copies gradients into buckets. FSDP2 shards what stays between steps, and
gathers weights as they are needed. Its peak is the largest of four moments, with R the bytes
outside blocks (embedding, head), and A the activations:

    end of forward      R gathered, R/2 for the head's gradient;                 all of A
                        the shard of the previous step's gradients
    start of backward   R and a block gathered, R/2 for the head's gradient      all of A
    middle              R, a block and the next one gathered;                    A of one block
                        the gradients of R and of two blocks
    end                 R gathered; its gradients, and their copy in reduction   no A

Lightning frees the gradients of a step between forward and backward of the next one.

Derived from FSDP2's buffers, and within 10% of the peak of real steps on two gloo processes
(tests/plan/test_sharded.py).
"""

from dataclasses import asdict, dataclass
from typing import NamedTuple

from torch import nn

from lightning_sv.plan.parallel import Parallel
from lightning_sv.plan.step_memory import StepMemory

#: fraction of a GPU's memory available to tensors; the CUDA context, NCCL and fragmentation use
#: the rest
USABLE = 0.9


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
    step: StepMemory,
    blocks: nn.ModuleList,
    parallel: Parallel,
    gpus: int,
    *,
    accumulate: bool = False,
) -> GpuMemory:
    """Return the memory of one GPU; `blocks` are the units that FSDP gathers.

    With `accumulate`, for several micro-batches, gradients exist during forward. DDP keeps its
    buckets in addition to the gradients unless these are views of them.
    """
    if parallel.kind == "fsdp" and gpus > 1:
        return _fully_sharded(step, blocks, gpus, accumulate=accumulate)
    state = step.parts()
    has_copies = parallel.kind == "ddp" and not parallel.bucket_view
    buckets = state.gradients if has_copies else 0
    return GpuMemory(*state, communication=buckets, activations=step.activations)


class _Moment(NamedTuple):
    """Bytes in addition to weights and optimizer state at one moment of a step."""

    gradients: int
    communication: int
    activations: int


def _fully_sharded(
    step: StepMemory, blocks: nn.ModuleList, shards: int, *, accumulate: bool
) -> GpuMemory:
    """Return the memory under FSDP2: sharded state plus the largest of four moments.

    A block is gathered in float32, because autocast casts later; the parameters outside blocks stay
    gathered.
    """
    shard = step.parts(shards)
    full = step.parts()
    sizes = [sum(parameter.nbytes for parameter in block.parameters()) for block in blocks]
    all_blocks = sum(sizes)
    block = max(sizes)
    root = full.weights - step.buffers - all_blocks  # R of the module docstring

    gradients_at_start = 0
    gradients_later = round(shard.gradients * all_blocks / (root + all_blocks))  # of the blocks
    unreduced_root = root  # gradients of R, which are reduced at the end
    if accumulate:  # all gradients stay unsharded until the last micro-batch
        gradients_at_start = full.gradients
        gradients_later = full.gradients
        unreduced_root = 0  # these are among them

    end_of_forward = _Moment(
        gradients=shard.gradients,
        communication=root + root // 2,
        activations=step.activations,
    )
    start = _Moment(
        gradients=gradients_at_start,
        communication=root + block + root // 2,
        activations=step.activations,
    )
    gathered = root + 2 * block
    gradients_in_flight = unreduced_root + 2 * block
    middle = _Moment(
        gradients=gradients_later,
        communication=gathered + gradients_in_flight,
        activations=step.activations // len(sizes),
    )
    end = _Moment(
        gradients=gradients_later, communication=root + unreduced_root + root, activations=0
    )
    peak = max(end_of_forward, start, middle, end, key=sum)
    return GpuMemory(
        weights=shard.weights,
        gradients=peak.gradients,
        optimizer=shard.optimizer,
        communication=peak.communication,
        activations=peak.activations,
    )
