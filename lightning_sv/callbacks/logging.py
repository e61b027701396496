"""Writing numbers to a run's loggers, and what does not count for its speed."""

import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from torch import Tensor

from lightning_sv.callbacks.run_state import callbacks_of, settings_of
from lightning_sv.gpus import gpu_of_card
from lightning_sv.optim.groups import full_tensor


def axis(logger: Any, trainer: L.Trainer) -> int:
    """Return the position on a logger's axis: optimizer steps, or tokens for the run's own."""
    return trainer.global_step * int(getattr(logger, "tokens_per_step", 1))


def write_scalars(trainer: L.Trainer, values: Mapping[str, float | Tensor]) -> None:
    """Log `values` to every logger at the current step, and let ModelCheckpoint monitor them.

    Call it on every device: values of sharded parameters are reduced.
    """
    numbers = {name: _number(value) for name, value in values.items()}
    for name, number in numbers.items():
        trainer.callback_metrics[name] = torch.tensor(number)
    for logger in trainer.loggers:
        logger.log_metrics(numbers, step=trainer.global_step)


def _number(value: float | Tensor) -> float:
    if isinstance(value, Tensor):
        value = full_tensor(value)
    return float(value)


class ThroughputClock(L.Callback):
    """Callback that measures the speed of a run; `idle` has the seconds that do not count."""

    idle = 0.0


@contextmanager
def measuring(trainer: L.Trainer) -> Iterator[None]:
    """Exclude the body from the throughput, and run it without a compiler.

    Compiling for the shapes of a measurement would take longer than the measurement.
    """
    start = time.perf_counter()
    with _eager(trainer.lightning_module):
        yield
    pause_throughput(trainer, time.perf_counter() - start)


def _eager(module: L.LightningModule) -> AbstractContextManager[object]:
    """Return the context that runs a compiled model eagerly; without one it does nothing."""
    settings = settings_of(module)
    if settings is None or settings.compile == "none":
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def pause_throughput(trainer: L.Trainer, seconds: float) -> None:
    """Exclude `seconds` from throughput/tokens_per_s, if it is logged."""
    for clock in callbacks_of(trainer, ThroughputClock):
        clock.idle += seconds


def peak_memory(device: torch.device) -> float:
    """Return the peak bytes: allocated on a GPU, resident in the process on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0  # KiB on Linux


def peak_flops(device: torch.device, precision: Any) -> float | None:
    """Return the peak FLOP/s in the device's data sheet; None if not listed or for a CPU."""
    if device.type != "cuda":
        return None
    gpu = gpu_of_card(torch.cuda.get_device_name(device))
    if gpu is not None:
        return gpu.peak(str(precision))
    dtype = torch.float32
    if str(precision).startswith(("bf16", "16")):
        dtype = torch.bfloat16
    return get_available_flops(device, dtype)
