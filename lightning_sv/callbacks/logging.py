"""Writing numbers to a run's loggers, and the peak memory of a device."""

import resource
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor

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


def peak_memory(device: torch.device) -> float:
    """Return the peak bytes: allocated on a GPU, resident in the process on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0  # KiB on Linux
