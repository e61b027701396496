"""Metrics summed between two writes: loss, learning rate, gradient norm, speed and memory."""

import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from torch import Tensor
from torch.optim import Optimizer

from lightning_sv.callbacks.run_state import StepTrigger, data_of, settings_of, was_skipped
from lightning_sv.callbacks.tensorboard_layout import Pages, lay_out
from lightning_sv.gpus import gpu_of_card
from lightning_sv.optim.groups import full_tensor, matrix_rate


class MetricAccumulator(L.Callback):
    """Callback that sums values of micro-batches on the device between writes; checkpoints have the sums."""

    def __init__(self, every_n_steps: int):
        self._clock = StepTrigger(f"every_n_steps of {type(self).__name__}", every_n_steps)
        self._trainer: L.Trainer | None = None
        #: sums of the current step, and of the steps since the last write; "sequences" counts
        self._open: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        self._is_restored = False  # True if the sums are those of a checkpoint, over all devices

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start, or continue a checkpoint's sums: rank 0 has those of all devices, others start at zero."""
        self._trainer = trainer
        self._clock.start(trainer)
        self._open = {}
        if trainer.global_step == 0:  # after an earlier fit
            self._sums = {}
        sums = {key: value.to(trainer.strategy.root_device) for key, value in self._sums.items()}
        keep = trainer.is_global_zero or not self._is_restored
        self._sums = sums if keep else {key: torch.zeros_like(each) for key, each in sums.items()}
        self._is_restored = False

    def add(self, values: dict[str, Tensor], sequences: int, *, keep: bool = True) -> bool:
        """Add a micro-batch's sums over its sequences, always with the same keys; return True if a write is due.

        A step that ends without `keep` was skipped and does not count.
        """
        assert self._trainer is not None, "on_train_start comes first"
        count = torch.full((), sequences, device=self._trainer.strategy.root_device)
        self._open = _added(self._open, values | {"sequences": count})
        if not self._clock.ended(self._trainer):
            return False
        if keep:
            self._sums = _added(self._sums, self._open)
        self._open = {}
        return self._clock.is_due(self._clock.step)

    def take(self) -> tuple[dict[str, Tensor], int]:
        """Return and reset the sums over micro-batches and devices and the number of sequences."""
        sums, self._sums = self._reduced(), {}
        return sums, int(sums.pop("sequences", 0))

    def _reduced(self) -> dict[str, Tensor]:
        assert self._trainer is not None
        strategy = self._trainer.strategy
        # A copy, because Lightning reduces in place.
        return {key: strategy.reduce(value.clone(), reduce_op="sum") for key, value in self._sums.items()}  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of all devices over complete steps; a collective."""
        return {"sums": {} if self._trainer is None else self._reduced()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the sums of the checkpoint, see `on_train_start`."""
        self._sums, self._is_restored = dict(state_dict["sums"]), True


def _added(sums: dict[str, Tensor], values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value + sums.get(key, 0) for key, value in values.items()}  # older checkpoints have fewer keys


class TrainingMonitor(MetricAccumulator):
    """Log a run's loss, learning rate, gradient norm, speed and memory.

    train/loss: mean over the steps since the last write, in nats per token. throughput/mfu: model FLOP/s over the
    peak in the GPU's data sheet, if it is listed. For a custom module, train/loss is the value that training_step
    returns, grad_norm is the module's attribute, if it has one, and there is no throughput/mfu. Without a
    `TokenDataModule`, throughput/steps_per_s replaces throughput/tokens_per_s and throughput/mfu.

    clipped_steps: share of the steps since the last write whose gradient norm was above gradient_clip_val, if a
    `PretrainModule` clips by norm.

    Args:
        every_n_steps: optimizer steps between two writes

    Raises:
        ConfigError: every_n_steps is below 1
    """

    def __init__(self, every_n_steps: int = 10):
        super().__init__(every_n_steps)
        self._since = (0.0, 0)
        #: seconds since the last write that do not count for the throughput
        self.idle = 0.0
        self._validation_began = 0.0
        self._tokens: float | None = None  # of a micro-batch on all devices
        self._batches = 0  # micro-batches since the last write
        self._clip_norm: float | None = None  # above which the norm of a step is clipped
        self._flops = self._peak = 0.0
        #: learning rate of the last step, because schedulers have stepped at the end of a batch
        self.lr: float | None = None
        #: last written values; None before the first write
        self.tokens_per_s: float | None = None
        self.last_loss: float | None = None
        self.val_loss: float | None = None

    def charts(self) -> Pages:
        """Return the chart of the share of clipped steps; none if the run does not clip by norm."""
        if self._clip_norm is None:
            return {}
        return {"steps": {"share that is clipped": ["Multiline", ["clipped_steps"]]}}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the chart layout of all callbacks, and start the clock."""
        self._clip_norm = clip_norm(trainer)
        lay_out(trainer)
        super().on_train_start(trainer, pl_module)
        self._since, self.idle, self._batches = (time.perf_counter(), trainer.global_step), 0.0, 0
        data, settings = data_of(trainer), settings_of(pl_module)
        self._tokens = None if data is None else data.tokens_per_step / trainer.accumulate_grad_batches
        if data is not None and settings is not None:
            self._flops = settings.flops_per_token(data.seq_len)
            self._peak = (peak_flops(pl_module.device, trainer.precision) or 0.0) * trainer.world_size

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Note the learning rate; with several optimizers that of the first one."""
        if optimizer is trainer.optimizers[0] and optimizer.param_groups:  # Lightning's mock for none has no groups
            self.lr = matrix_rate(optimizer.param_groups)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Accumulate the loss on the device; write every n optimizer steps."""
        self._batches += 1
        n = len(batch) if isinstance(batch, Tensor) else 1
        given = outputs if isinstance(outputs, dict) else {"loss": outputs}
        loss = given.get("nats", given.get("loss"))
        if loss is not None and "nats" not in given and pl_module.automatic_optimization:
            loss = loss * trainer.accumulate_grad_batches  # Lightning has divided it
        if loss is None:  # a training_step may return nothing
            loss, n = torch.zeros((), device=pl_module.device), 0
        wide = loss.detach().to(torch.promote_types(loss.dtype, torch.float32))  # bf16 would round the sum
        values = {"loss": wide * n} | self._clipped(trainer, pl_module)
        if self.add(values, n, keep=not was_skipped(pl_module)):
            self._write(trainer, pl_module)

    def _clipped(self, trainer: L.Trainer, module: Any) -> dict[str, Tensor]:
        """Return 1 for a step that the batch completed, and 1 if its gradient was clipped; else 0."""
        if self._clip_norm is None:
            return {}
        is_step = trainer.global_step != self._clock.step
        is_clipped = is_step and (module.grad_norm or 0.0) > self._clip_norm
        flags = {"steps": is_step, "clipped": is_clipped}
        return {key: torch.full((), float(flag), device=module.device) for key, flag in flags.items()}

    def _write(self, trainer: L.Trainer, module: Any) -> None:
        sums, n = self.take()
        seconds = max(1e-9, time.perf_counter() - self._since[0] - self.idle)
        scalars = {} if self.lr is None else {"lr": self.lr}
        if isinstance(norm := getattr(module, "grad_norm", None), float | Tensor):
            scalars["grad_norm"] = float(norm)
        if self._tokens is None:
            scalars["throughput/steps_per_s"] = (trainer.global_step - self._since[1]) / seconds
        else:
            tokens = self._batches * self._tokens / seconds
            self.tokens_per_s = scalars["throughput/tokens_per_s"] = tokens
            if self._peak:
                scalars["throughput/mfu"] = tokens * self._flops / self._peak
        scalars["memory/peak_gib"] = peak_memory(module.device) / 2**30
        if n:  # not if every step was skipped, or without a loss
            self.last_loss = scalars["train/loss"] = sums["loss"].item() / n
        if n and "clipped" in sums and module.grad_norm is not None:  # a subclass may clip without setting it
            scalars["clipped_steps"] = (sums["clipped"] / sums["steps"]).item()
        if skipped := getattr(getattr(module, "nonfinite", None), "skipped", 0):
            scalars["skipped_steps"] = skipped
        # speed and memory differ between ranks, but callbacks of all ranks must monitor the same values
        write_scalars(trainer, trainer.strategy.broadcast(scalars))
        self._since, self.idle, self._batches = (time.perf_counter(), trainer.global_step), 0.0, 0

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the throughput clock."""
        self._validation_began = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write val/loss and val/perplexity of a `PretrainModule`, and restart the throughput clock."""
        self.idle += time.perf_counter() - self._validation_began
        if trainer.state.fn != "fit" or trainer.sanity_checking or "val/loss" not in trainer.callback_metrics:
            return
        loss = trainer.callback_metrics["val/loss"]
        self.val_loss = float(loss)
        # other modules, and subclasses with a validation_step of their own, log their own losses
        if settings_of(pl_module) is not None and "val/perplexity" in trainer.callback_metrics:
            write_scalars(trainer, {"val/loss": self.val_loss, "val/perplexity": float(loss.exp())})


def clip_norm(trainer: L.Trainer) -> float | None:
    """Return the limit of a `PretrainModule`'s global gradient norm; None without one, or with limits per role."""
    settings = settings_of(trainer.lightning_module)
    by_norm = trainer.gradient_clip_algorithm in (None, "norm")
    is_automatic = trainer.lightning_module.automatic_optimization
    if settings is None or settings.optim.clip_by_role or not (by_norm and is_automatic):
        return None
    return trainer.gradient_clip_val or None


def is_monitored(trainer: L.Trainer) -> bool:
    """Return True if a `TrainingMonitor` logs the losses, so that the module need not."""
    return any(isinstance(callback, TrainingMonitor) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def axis(logger: Any, trainer: L.Trainer) -> int:
    """Return the position on a logger's axis: optimizer steps, or tokens for the run's own logger."""
    return trainer.global_step * int(getattr(logger, "tokens_per_step", 1))


def write_scalars(trainer: L.Trainer, values: Mapping[str, float | Tensor]) -> None:
    """Log `values` to every logger at the current optimizer step, and let ModelCheckpoint and others monitor them.

    Call it on every device: values of sharded parameters are reduced.
    """
    numbers = {name: float(full_tensor(x) if isinstance(x, Tensor) else x) for name, x in values.items()}
    trainer.callback_metrics.update({name: torch.tensor(number) for name, number in numbers.items()})
    for logger in trainer.loggers:
        logger.log_metrics(numbers, step=trainer.global_step)


@contextmanager
def measuring(trainer: L.Trainer) -> Iterator[None]:
    """Exclude the body from the throughput; run it without a compiler, whose work for other shapes would take long."""
    settings, start = settings_of(trainer.lightning_module), time.perf_counter()
    compiled = settings is not None and settings.compile != "none"
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        yield
    pause_throughput(trainer, time.perf_counter() - start)


def pause_throughput(trainer: L.Trainer, seconds: float) -> None:
    """Exclude `seconds` from throughput/tokens_per_s, if it is logged."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, TrainingMonitor):
            callback.idle += seconds


def peak_memory(device: torch.device) -> float:
    """Return the peak bytes: allocated on a GPU, resident in the process on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0  # KiB on Linux


def peak_flops(device: torch.device, precision: Any) -> float | None:
    """Return the peak FLOP/s in the device's data sheet; None if not listed or for a CPU."""
    if device.type != "cuda":
        return None
    if gpu := gpu_of_card(torch.cuda.get_device_name(device)):
        return gpu.peak(str(precision))
    half = str(precision).startswith(("bf16", "16"))
    return get_available_flops(device, torch.bfloat16 if half else torch.float32)
