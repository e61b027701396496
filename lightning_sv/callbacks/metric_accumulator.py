"""Sums of metrics between two writes, saved in checkpoints for any number of devices."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_sv.callbacks.step_trigger import StepTrigger


class MetricAccumulator(L.Callback):
    """Callback that sums values of micro-batches on the device between writes.

    Args:
        section: name of the callback in the config, for errors
        every_n_steps: optimizer steps between two writes

    Raises:
        ConfigError: every_n_steps is below 1
    """

    def __init__(self, section: str, every_n_steps: int):
        self._clock = StepTrigger(f"{section}.every_n_steps", every_n_steps)
        self._trainer: L.Trainer | None = None
        #: sums of the current step, and of the steps since the last write; "sequences" counts
        self._open: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start, or continue a checkpoint's sums: rank 0 has those of all devices, others start at zero."""
        self._trainer = trainer
        self._clock.start(trainer)
        device = trainer.strategy.root_device
        self._sums = {
            key: value.to(device) if trainer.is_global_zero else torch.zeros_like(value, device=device)
            for key, value in self._sums.items()
        }

    def add(self, values: dict[str, Tensor], sequences: int, *, keep: bool = True) -> bool:
        """Add a micro-batch; return True if a write is due after it.

        Args:
            values: sums over its sequences; always with the same keys
            sequences: number of sequences of the micro-batch
            keep: if False at the end of a step, the step was skipped and does not count
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
        self._sums = dict(state_dict["sums"])


def _added(sums: dict[str, Tensor], values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: sums[key] + value if sums else value for key, value in values.items()}
