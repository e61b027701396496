"""Loss, learning rate, gradient norm, speed and memory, against training tokens."""

import resource
import sys
import time
from functools import cache
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.throughput import get_available_flops

from lightning_sv.callbacks.charts import lay_out
from lightning_sv.callbacks.trained import TrainedModule, data_of, tokens_seen
from lightning_sv.callbacks.window import Window
from lightning_sv.nn.gpus import GPUS


class Scalars(Window):
    """Writes the run's scalars to the logger; the step of every scalar is training tokens.

    train/loss: mean over the steps since the last write, nats per token. throughput/mfu: model FLOPs over the
    peak of the device's data sheet, with throughput/mfu_of_measured, over what a large matrix product reaches there;
    where no peak is listed, as for a CPU, throughput/mfu is the latter.

    Args:
        every_n_steps: optimizer steps between two writes
    """

    def __init__(self, every_n_steps: int = 10):
        super().__init__("scalars", every_n_steps)
        self._since = (0.0, 0)
        self._idle = 0.0
        #: as last written; None before the first write
        self.tokens_per_s: float | None = None
        self.last_loss: float | None = None
        self.val_loss: float | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: TrainedModule) -> None:
        """Lay the charts of all callbacks out, and start the clock."""
        lay_out(trainer, pl_module)
        super().on_train_start(trainer, pl_module)
        self._since, self._idle = (time.perf_counter(), trainer.global_step), 0.0
        seq_len = data_of(trainer).seq_len
        self._flops = pl_module.flops_per_token(seq_len)
        listed = peak_flops(pl_module.device, trainer.precision)
        measured = measured_flops(pl_module.device, trainer.precision)
        self._peaks = {"mfu": (listed or measured) * trainer.world_size}
        if listed:
            self._peaks["mfu_of_measured"] = measured * trainer.world_size

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: TrainedModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Accumulate the loss on the device; write every n optimizer steps."""
        n = len(batch)
        if self.add({"loss": outputs["nats"] * n}, n, keep=not pl_module.nonfinite.skipped_now):
            self._write(trainer, pl_module)

    def _write(self, trainer: L.Trainer, pl_module: TrainedModule) -> None:
        sums, n = self.take()
        now, steps = time.perf_counter(), trainer.global_step - self._since[1]
        tokens_per_step = data_of(trainer).tokens_per_step
        self.tokens_per_s = speed = steps * tokens_per_step / max(1e-9, now - self._since[0] - self._idle)
        scalars = {
            "lr": pl_module.step_lr,
            "grad_norm": pl_module.grad_norm,
            "throughput/tokens_per_s": speed,
            **{f"throughput/{key}": speed * self._flops / peak for key, peak in self._peaks.items()},
            "memory/peak_gib": peak_memory(pl_module.device) / 2**30,
        }
        if n:  # not if every step was skipped
            self.last_loss = scalars["train/loss"] = sums["loss"].item() / n
        if pl_module.nonfinite.skipped:
            scalars["skipped_steps"] = pl_module.nonfinite.skipped
        write_scalars(trainer, scalars)
        self._since, self._idle = (time.perf_counter(), trainer.global_step), 0.0

    def pause(self, seconds: float) -> None:
        """Leave `seconds` out of the throughput: they went into measuring, not training."""
        self._idle += seconds

    def on_validation_start(self, trainer: L.Trainer, pl_module: TrainedModule) -> None:
        """Stop the throughput clock."""
        self._validation_began = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: TrainedModule) -> None:
        """Write val/loss and val/perplexity, and restart the throughput clock."""
        self.pause(time.perf_counter() - self._validation_began)
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        loss = trainer.callback_metrics["val/loss"]
        self.val_loss = float(loss)
        write_scalars(trainer, {"val/loss": self.val_loss, "val/perplexity": float(loss.exp())})


def write_scalars(trainer: L.Trainer, values: dict[str, float]) -> None:
    """Log `values` at the tokens seen so far."""
    for logger in trainer.loggers:
        logger.log_metrics(values, step=tokens_seen(trainer))


def pause_throughput(trainer: L.Trainer, seconds: float) -> None:
    """Leave `seconds` out of throughput/tokens_per_s, if it is logged."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, Scalars):
            callback.pause(seconds)


def peak_memory(device: torch.device) -> float:
    """Peak bytes: allocated on a GPU, resident in the process on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)


def peak_flops(device: torch.device, precision: Any) -> float | None:
    """Peak FLOP/s of the device's data sheet; None where it is not listed, and for a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if gpu := next((gpu for gpu in GPUS if gpu.card == name), None):
        return gpu.peak(str(precision))
    return get_available_flops(device, torch.bfloat16 if str(precision).startswith("bf16") else torch.float32)


@cache
def measured_flops(device: torch.device, precision: Any) -> float:
    """FLOP/s of the best of five large products, on a CPU in float32; measured once in a process."""
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda and str(precision).startswith("bf16") else torch.float32
    n, best = (8192 if cuda else 1024), float("inf")
    with torch.random.fork_rng([device] if cuda else []):  # the training's numbers do not hang on this
        a = torch.randn(n, n, device=device, dtype=dtype)
    for _ in range(5):
        began = time.perf_counter()
        float((a @ a)[0, 0])
        best = min(best, time.perf_counter() - began)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)  # memory/peak_gib is the training's
    return 2 * n**3 / best
