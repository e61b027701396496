"""Hours from floating-point operations: what GPUs can do, and the share of it that a run reaches."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: shares of the peak shown where none is given or measured: what well-tuned dense models of this size span
MFUS = (0.3, 0.4, 0.5)


class Gpu(NamedTuple):
    """One kind of GPU.

    Attributes:
        name: as on the command line.
        memory: bytes that torch reports as its total.
        bf16: peak FLOP/s of dense bf16 products, without sparsity.
        fp32: peak FLOP/s in float32, without TF32.
    """

    name: str
    memory: int
    bf16: float
    fp32: float

    def peak(self, precision: str) -> float:
        """Peak FLOP/s of the products under trainer.precision."""
        return self.bf16 if precision.startswith("bf16") else self.fp32


#: NVIDIA's data sheets (SXM); memory as torch.cuda reports it, a little less than the name says
GPUS = (
    Gpu("h100", int(79.1 * 2**30), 989.4e12, 66.9e12),
    Gpu("h200", int(139.8 * 2**30), 989.4e12, 66.9e12),
    Gpu("a100-80gb", int(79.1 * 2**30), 312e12, 19.5e12),
    Gpu("a100-40gb", int(39.4 * 2**30), 312e12, 19.5e12),
)


def find_gpu(name: str, memory_gib: float | None = None) -> Gpu:
    """Return the GPU of this name, with another memory if given.

    Raises:
        ValueError: an unknown name, or no memory.
    """
    known = {gpu.name: gpu for gpu in GPUS}
    if name not in known:
        raise ValueError(f"GPU {name!r} is unknown; known: {' '.join(known)}.")
    if memory_gib is None:
        return known[name]
    if memory_gib <= 0:
        raise ValueError(f"--gpu_memory is {memory_gib} GiB; it must be positive.")
    return known[name]._replace(memory=int(memory_gib * 2**30))


def train_hours(tokens: int, flops_per_token: float, gpus: int, peak: float, mfu: float) -> float:
    """Tokens x FLOPs a token / (GPUs x peak x MFU), in hours.

    Args:
        tokens: of the run.
        flops_per_token: of forward and backward (`lightning_sv.nn.flops_per_token`).
        gpus: their number.
        peak: FLOP/s of one.
        mfu: share of the peak that the model's FLOPs reach, recomputation not counted (arXiv:2204.02311).

    Raises:
        ValueError: mfu is no share.
    """
    if not 0 < mfu <= 1:
        raise ValueError(f"the MFU is {mfu}; it must be above 0 and at most 1 (0.4 is 40%).")
    return tokens * flops_per_token / (gpus * peak * mfu) / 3600


def measured_mfu(tokens: NDArray[np.int64], values: NDArray[np.float64]) -> float:
    """Harmonic mean of throughput/mfu after the first tenth of the tokens: the share that gives the run's time.

    Args:
        tokens: (N,) training tokens of each value.
        values: (N,) the MFU since the value before.

    Raises:
        ValueError: no value is left, or one is not positive.
    """
    warm = values[tokens > tokens[-1] / 10] if len(tokens) > 1 else values[:0]
    if not len(warm) or not (warm > 0).all():
        raise ValueError("the run of --run logged too few positive values of throughput/mfu; give --mfu instead.")
    return float(len(warm) / (1 / warm).sum())
