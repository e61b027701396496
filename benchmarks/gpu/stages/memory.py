"""Peak memory of a step as `plan` expects it, to compare with that of the overhead stages."""

from typing import Any

from benchmarks.gpu.process import Task
from benchmarks.gpu.sizes import ARMS, size_of
from lightning_sv.optim import OptimConfig
from lightning_sv.plan.compiled_memory import CompiledActivations
from lightning_sv.plan.step_memory import memory_between_steps
from lightning_sv.settings.model import PretrainConfig


def run(task: Task) -> dict[str, Any]:
    """Return MiB per size, arm and micro-batch; the timed steps free gradients before forward."""
    found: dict[str, Any] = {"planned_mib": {}}
    for name in ("1b", "0.12b"):
        size = size_of(name, task.toy)
        for arm in ARMS:
            config = PretrainConfig(size.config, arm, optim=OptimConfig(lr=1e-3), compile="block")
            weights, _, optimizer = memory_between_steps(config).parts()
            activations = CompiledActivations(config, size.seq_len, "bf16-mixed")
            for batch, sequences in size.batches.items():
                peak = weights + optimizer + activations.peak(sequences)
                found["planned_mib"][f"{name} {arm}, {batch}"] = round(peak / 2**20)
            task.save(found)
    return found
