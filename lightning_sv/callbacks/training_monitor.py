"""The callback `TrainingMonitor`: loss, learning rate, gradient norm, speed and memory."""

import time
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sv.callbacks.logging import peak_memory, write_scalars
from lightning_sv.callbacks.metric_accumulator import MetricAccumulator, sequences_in
from lightning_sv.callbacks.run_state import callbacks_of, is_fitting, settings_of
from lightning_sv.callbacks.tensorboard_layout import lay_out
from lightning_sv.callbacks.throughput import Throughput
from lightning_sv.optim.groups import matrix_rate
from lightning_sv.runs.tags import TRAIN_LOSS, VAL_LOSS


class TrainingMonitor(MetricAccumulator):
    """Log a run's loss, learning rate, gradient norm, speed and memory.

    train/loss: mean over the steps since the last write, in nats per token. throughput/mfu: model
    FLOP/s over the peak in the GPU's data sheet, if it is listed. For a custom module, train/loss
    is the value that training_step returns, grad_norm is the module's attribute, if it has one, and
    there is no throughput/mfu. Without a `TokenDataModule`, throughput/steps_per_s replaces
    throughput/tokens_per_s and throughput/mfu.

    clipped_steps: share of the steps since the last write whose gradient norm was above
    gradient_clip_val, if a `PretrainModule` clips by norm.

    Args:
        every_n_steps: optimizer steps between two writes

    Raises:
        ConfigError: every_n_steps is below 1
    """

    def __init__(self, every_n_steps: int = 10):
        super().__init__(every_n_steps)
        self.throughput = Throughput()
        self._validation_began = 0.0
        self._clip_norm: float | None = None  # above which the norm of a step is clipped
        #: learning rate of the last step, because schedulers have stepped at the end of a batch
        self.lr: float | None = None
        #: last written values; None before the first write
        self.last_loss: float | None = None
        self.val_loss: float | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the layout of TensorBoard's charts, and start the clock."""
        self._clip_norm = clip_norm(trainer)
        lay_out(trainer)
        super().on_train_start(trainer, pl_module)
        self.throughput.start(trainer, pl_module)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        """Note the learning rate; with several optimizers that of the first one."""
        is_first = optimizer is trainer.optimizers[0]
        if is_first and optimizer.param_groups:  # Lightning's mock for none has no groups
            self.lr = matrix_rate(optimizer.param_groups)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Accumulate the loss on the device; write every n optimizer steps."""
        self.throughput.count_batch()
        n = sequences_in(batch)
        loss = mean_loss(trainer, pl_module, outputs)
        if loss is None:  # a training_step may return nothing
            loss = torch.zeros((), device=pl_module.device)
            n = 0
        values = {"loss": loss * n} | self._clipped(trainer, pl_module)
        if self.add(values, n):
            self.act(trainer, pl_module)

    def _clipped(self, trainer: L.Trainer, module: Any) -> dict[str, Tensor]:
        """Return 1 if the batch completed a step, and 1 if its gradient was clipped; else 0."""
        if self._clip_norm is None:
            return {}
        is_step = trainer.global_step != self._clock.step
        is_clipped = is_step and (module.grad_norm or 0.0) > self._clip_norm
        return {
            "steps": torch.full((), float(is_step), device=module.device),
            "clipped": torch.full((), float(is_clipped), device=module.device),
        }

    def act(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write the means since the last write, and the present speed and memory."""
        sums, n = self.take()
        scalars = self._of_last_step(pl_module) | self.throughput.measure(trainer)
        scalars["memory/peak_gib"] = peak_memory(pl_module.device) / 2**30
        if n:  # not without a loss
            self.last_loss = sums["loss"].item() / n
            scalars[TRAIN_LOSS] = self.last_loss
            # a subclass may clip without setting grad_norm
            if "clipped" in sums and pl_module.grad_norm is not None:
                scalars["clipped_steps"] = (sums["clipped"] / sums["steps"]).item()
        # speed and memory differ between ranks, but callbacks of all ranks must monitor the same
        # values
        write_scalars(trainer, trainer.strategy.broadcast(scalars))
        self.throughput.restart(trainer)

    def _of_last_step(self, module: Any) -> dict[str, float]:
        """Return the learning rate and the norm of the gradient, if they are known."""
        scalars: dict[str, float] = {}
        if self.lr is not None:
            scalars["lr"] = self.lr
        norm = getattr(module, "grad_norm", None)
        if isinstance(norm, float | Tensor):
            scalars["grad_norm"] = float(norm)
        return scalars

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the throughput clock."""
        self._validation_began = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write val/loss and val/perplexity of a `PretrainModule`, and restart the clock."""
        self.throughput.exclude(time.perf_counter() - self._validation_began)
        metrics = trainer.callback_metrics
        if not is_fitting(trainer) or VAL_LOSS not in metrics:
            return
        loss = metrics[VAL_LOSS]
        self.val_loss = float(loss)
        # other modules, and subclasses with a validation_step of their own, log their own losses
        if settings_of(pl_module) is not None and "val/perplexity" in metrics:
            perplexity = float(loss.exp())
            write_scalars(trainer, {VAL_LOSS: self.val_loss, "val/perplexity": perplexity})


def mean_loss(trainer: L.Trainer, module: L.LightningModule, outputs: Any) -> Tensor | None:
    """Return the loss of a micro-batch, at least in float32; None if training_step returned none.

    `nats` of a `PretrainModule` comes first, because its loss may contain a router's loss.
    """
    given = outputs if isinstance(outputs, dict) else {"loss": outputs}
    loss = given.get("nats", given.get("loss"))
    if loss is None:
        return None
    if "nats" not in given and module.automatic_optimization:
        loss = loss * trainer.accumulate_grad_batches  # Lightning has divided it
    wide: Tensor = loss.detach()
    return wide.to(torch.promote_types(wide.dtype, torch.float32))  # bf16 would round the sum


def clip_norm(trainer: L.Trainer) -> float | None:
    """Return the limit of a `PretrainModule`'s global gradient norm; None without a single one."""
    settings = settings_of(trainer.lightning_module)
    if settings is None or settings.optim.clip_by_role:
        return None
    if trainer.gradient_clip_algorithm not in (None, "norm"):
        return None
    if not trainer.lightning_module.automatic_optimization:
        return None
    return trainer.gradient_clip_val or None


def is_monitored(trainer: L.Trainer) -> bool:
    """Return True if a `TrainingMonitor` logs the losses, so that the module need not."""
    return bool(callbacks_of(trainer, TrainingMonitor))
