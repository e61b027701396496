"""Losses of a `PretrainModule`, and where they are logged."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_sv.callbacks.progress import RunProgress
from lightning_sv.callbacks.training_monitor import is_monitored


class EvaluationLoss:
    """Mean loss per token of a validation or test, in float64, for unequal batches and devices."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None  # nats and tokens

    def add(self, nats: Tensor, n_tokens: int) -> None:
        """Add the mean loss of a batch, without a copy from the host."""
        tokens = torch.full_like(nats, n_tokens, dtype=torch.float64)
        sums = torch.stack((nats.double() * tokens, tokens))
        self._sums = sums if self._sums is None else self._sums + sums

    def log(self, module: L.LightningModule) -> None:
        """Log the mean over all batches and devices and its perplexity; a collective.

        The next batch starts a new mean.
        """
        if self._sums is None:
            return  # a subclass logs its own losses
        trainer = module.trainer
        sums: Any = trainer.strategy.reduce(self._sums, reduce_op="sum")  # type: ignore[arg-type]
        nats, tokens = sums
        self._sums = None
        loss = nats / tokens

        split = "test" if trainer.testing else "val"
        in_bar = _is_in_bar(trainer)
        logger = _loggers_of(trainer)
        # Equal on all ranks; without sync_dist Lightning warns.
        module.log(f"{split}/loss", loss, prog_bar=in_bar, logger=logger, sync_dist=True)
        module.log(f"{split}/perplexity", loss.exp(), logger=logger, sync_dist=True)


def log_training_loss(module: L.LightningModule, nats: Tensor, batch_size: int) -> None:
    """Log train/loss, in nats per token."""
    trainer = module._trainer
    logger = None
    # A TrainingMonitor logs what training_step returns. In manual optimization a subclass may
    # return nothing, so the module logs the loss.
    if module.automatic_optimization:
        logger = _loggers_of(trainer)
    in_bar = _is_in_bar(trainer)
    module.log("train/loss", nats, prog_bar=in_bar, logger=logger, batch_size=batch_size)


def _is_in_bar(trainer: L.Trainer | None) -> bool:
    """Return True if Lightning's bar shows the losses, for which it waits for the device."""
    return trainer is None or not isinstance(trainer.progress_bar_callback, RunProgress)


def _loggers_of(trainer: L.Trainer | None) -> bool | None:
    """Return the argument `logger` of `log`: False if a `TrainingMonitor` logs the losses of a fit.

    It alone logs them then, as means over all devices.
    """
    if trainer is None or trainer.state.fn != "fit":
        return None
    return False if is_monitored(trainer) else None
