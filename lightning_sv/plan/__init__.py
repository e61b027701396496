"""What a run will take before it is started: memory of a GPU, hours, checkpoint, data."""

from lightning_sv.nn.gpus import GPUS, Gpu, find_gpu
from lightning_sv.plan.device import GpuMemory, Parallel, gpu_memory
from lightning_sv.plan.hours import MFUS, train_hours
from lightning_sv.plan.memory import StepMemory, step_memory
from lightning_sv.plan.plan import Plan, fitting_micro_batch, make_plan, plan_steps

__all__ = [
    "GPUS",
    "MFUS",
    "Gpu",
    "GpuMemory",
    "Parallel",
    "Plan",
    "StepMemory",
    "find_gpu",
    "fitting_micro_batch",
    "gpu_memory",
    "make_plan",
    "plan_steps",
    "step_memory",
    "train_hours",
]
