"""GPU models, their memory and peak throughput."""

import math
from typing import NamedTuple

from lightning_sv.errors import expect, expect_known


class Gpu(NamedTuple):
    """A GPU model.

    Attributes:
        name: name on the command line
        card: name reported by the driver
        memory: total memory reported by torch, in bytes
        half: peak FLOP/s of dense products in bf16 or float16, without sparsity
        fp32: peak FLOP/s in float32, without TF32
    """

    name: str
    card: str
    memory: int
    half: float
    fp32: float

    def peak(self, precision: str) -> float:
        """Return the peak FLOP/s of products under trainer.precision."""
        return self.half if precision.startswith(("bf16", "16")) else self.fp32


#: From NVIDIA's data sheets; memory as reported by torch.cuda, slightly less than the nominal size.
GPUS = (
    Gpu("h100", "NVIDIA H100 80GB HBM3", int(79.1 * 2**30), 989.4e12, 66.9e12),
    Gpu("h200", "NVIDIA H200", int(139.8 * 2**30), 989.4e12, 66.9e12),
    Gpu("h100-pcie", "NVIDIA H100 PCIe", int(79.1 * 2**30), 756e12, 51.2e12),
    Gpu("h100-nvl", "NVIDIA H100 NVL", int(93.1 * 2**30), 835e12, 60e12),
    Gpu("a100-80gb", "NVIDIA A100-SXM4-80GB", int(79.1 * 2**30), 312e12, 19.5e12),
    Gpu("a100-40gb", "NVIDIA A100-SXM4-40GB", int(39.4 * 2**30), 312e12, 19.5e12),
)


def gpu_of_card(card: str) -> Gpu | None:
    """Return the GPU with the driver's name `card`; None if it is not listed."""
    return next((gpu for gpu in GPUS if gpu.card == card), None)


def find_gpu(name: str, memory_gib: float | None = None) -> Gpu:
    """Return the GPU of this name, with a different memory size if given."""
    gpus = {gpu.name: gpu for gpu in GPUS}
    name = name.lower()
    expect_known("GPU", name, gpus)
    if memory_gib is None:
        return gpus[name]
    expect(
        0 < memory_gib < math.inf, "--gpu_memory", f"{memory_gib} GiB", "a positive, finite number."
    )
    return gpus[name]._replace(memory=int(memory_gib * 2**30))
