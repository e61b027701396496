"""Mean losses per token, and where a `PretrainModule` logs its losses."""

import lightning as L
import torch
from torch import Tensor

from lightning_sv.callbacks.progress import RunProgress
from lightning_sv.callbacks.training_monitor import is_monitored


class TokenMean:
    """Mean of losses over tokens, in float64, for unequal batches and devices."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None  # nats and tokens

    def add(self, nats: Tensor, n_tokens: int) -> None:
        """Add the mean loss of a batch, without a copy from the host."""
        tokens = torch.full_like(nats, n_tokens, dtype=torch.float64)
        sums = torch.stack((nats.double() * tokens, tokens))
        self._sums = sums if self._sums is None else self._sums + sums

    def reduce(self, trainer: L.Trainer) -> Tensor | None:
        """Return the mean over all batches and devices, a collective; None without a batch."""
        if self._sums is None:
            return None
        sums = trainer.strategy.reduce(self._sums, reduce_op="sum")  # type: ignore[arg-type]
        nats, tokens = sums  # type: ignore[misc]
        return nats / tokens


def is_in_bar(trainer: L.Trainer | None) -> bool:
    """Return True if Lightning's bar shows the losses, for which it waits for the device."""
    return trainer is None or not isinstance(trainer.progress_bar_callback, RunProgress)


def loggers_of(trainer: L.Trainer | None) -> bool | None:
    """Return the argument `logger` of `log`: False if a `TrainingMonitor` logs the losses of a fit.

    It alone logs them then, as means over all devices.
    """
    if trainer is None or trainer.state.fn != "fit":
        return None
    return False if is_monitored(trainer) else None
