"""Speed of training between two writes, without validations and measurements."""

import time

import lightning as L
import torch
from lightning.fabric.utilities.throughput import get_available_flops

from lightning_sv.callbacks.run_state import data_of, settings_of
from lightning_sv.gpus import gpu_of_card
from lightning_sv.runs.tags import MFU


class Throughput:
    """Clock of a run's micro-batches.

    Attributes:
        tokens_per_s: last speed; None before the first, and without a `TokenDataModule`
    """

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None
        self._began = 0.0
        self._first_step = 0
        self._n_batches = 0
        self._excluded = 0.0  # seconds
        self._tokens_per_batch: float | None = None  # in a micro-batch on all devices
        self._flops_per_token = 0.0
        self._peak_flops = 0.0  # FLOP/s of all devices; 0 if not known

    def start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Start at the first step of a fit, whose units are known now."""
        data = data_of(trainer)
        settings = settings_of(module)
        self._tokens_per_batch = None
        if data is not None:
            self._tokens_per_batch = data.tokens_per_step / trainer.accumulate_grad_batches
        if data is not None and settings is not None:
            self._flops_per_token = settings.plan.flops_per_token(data.seq_len)
            of_one_device = _peak_flops(module.device, str(trainer.precision)) or 0.0
            self._peak_flops = of_one_device * trainer.world_size
        self.restart(trainer)

    def restart(self, trainer: L.Trainer) -> None:
        """Measure from now on."""
        self._began = time.perf_counter()
        self._first_step = trainer.global_step
        self._n_batches = 0
        self._excluded = 0.0

    def count_batch(self) -> None:
        """Count a micro-batch."""
        self._n_batches += 1

    def exclude(self, seconds: float) -> None:
        """Leave out a time in which the run did not train."""
        self._excluded += seconds

    def measure(self, trainer: L.Trainer) -> dict[str, float]:
        """Return tokens per second and MFU, or steps per second, since the last restart."""
        elapsed = time.perf_counter() - self._began
        seconds = max(1e-9, elapsed - self._excluded)
        if self._tokens_per_batch is None:
            n_steps = trainer.global_step - self._first_step
            return {"throughput/steps_per_s": n_steps / seconds}
        self.tokens_per_s = self._n_batches * self._tokens_per_batch / seconds
        speeds = {"throughput/tokens_per_s": self.tokens_per_s}
        if self._peak_flops:
            speeds[MFU] = self.tokens_per_s * self._flops_per_token / self._peak_flops
        return speeds


def _peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the peak FLOP/s in the device's data sheet; None if not listed or for a CPU."""
    if device.type != "cuda":
        return None
    gpu = gpu_of_card(torch.cuda.get_device_name(device))
    if gpu is not None:
        return gpu.peak(precision)
    dtype = torch.bfloat16 if precision.startswith(("bf16", "16")) else torch.float32
    return get_available_flops(device, dtype)
