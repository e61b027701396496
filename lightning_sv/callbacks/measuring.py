"""Measurements during a run, which do not count for its speed."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import lightning as L
import torch

from lightning_sv.callbacks.run_state import callbacks_of, settings_of
from lightning_sv.callbacks.training_monitor import TrainingMonitor


@contextmanager
def measuring(trainer: L.Trainer) -> Iterator[None]:
    """Exclude the body from the throughput, and run it without a compiler.

    Compiling for the shapes of a measurement would take longer than the measurement.
    """
    start = time.perf_counter()
    with _eager(trainer.lightning_module):
        yield
    for monitor in callbacks_of(trainer, TrainingMonitor):
        monitor.throughput.exclude(time.perf_counter() - start)


def _eager(module: L.LightningModule) -> AbstractContextManager[object]:
    """Return the context that runs a compiled model eagerly; without one it does nothing."""
    settings = settings_of(module)
    if settings is None or settings.compile == "none":
        return nullcontext()
    return torch.compiler.set_stance("force_eager")
