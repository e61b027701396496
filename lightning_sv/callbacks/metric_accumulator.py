"""Sums over micro-batches and devices between two writes, which survive a resume."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_sv.callbacks.step_callback import StepCallback


class MetricAccumulator(StepCallback):
    """Callback that sums values of micro-batches on the device, and writes them at some steps.

    Checkpoints have the sums of all devices. After a resume rank 0 continues them, and the other
    ranks start at zero.
    """

    def __init__(self, every_n_steps: int, model: str | None = None):
        super().__init__(every_n_steps, model)
        self._trainer: L.Trainer | None = None
        #: sums of the micro-batches of the current step; "sequences" has their number
        self._step_sums: dict[str, Tensor] = {}
        #: sums of the complete steps since the last write
        self._sums: dict[str, Tensor] = {}
        #: True if the sums are those of a checkpoint, which are of all devices
        self._is_restored = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start, or continue a checkpoint's sums; nothing is written before the first step."""
        self._trainer = trainer
        self._clock.start(trainer)
        self._step_sums = {}
        is_new = trainer.global_step == 0
        if is_new:  # drop the sums of an earlier fit
            self._sums = {}
        # Rank 0 continues a checkpoint's sums, which are of all devices. The others start at zeros
        # and not at {}, because all devices reduce the same keys.
        starts_at_zero = self._is_restored and not trainer.is_global_zero
        self._is_restored = False
        for key, value in self._sums.items():
            if starts_at_zero:
                value = torch.zeros_like(value)
            self._sums[key] = value.to(trainer.strategy.root_device)

    def add(self, values: dict[str, Tensor], sequences: int) -> bool:
        """Add a micro-batch; return True if a write is due.

        Args:
            values: sums over the sequences of the micro-batch, always with the same keys
            sequences: number of sequences
        """
        assert self._trainer is not None, "on_train_start comes first"
        count = torch.full((), sequences, device=self._trainer.strategy.root_device)
        self._step_sums = _added(self._step_sums, values | {"sequences": count})
        if not self._clock.ended(self._trainer):
            return False
        self._sums = _added(self._sums, self._step_sums)
        self._step_sums = {}
        return self._clock.is_due(self._clock.step)

    def take(self) -> tuple[dict[str, Tensor], int]:
        """Return and reset the sums over micro-batches and devices and the number of sequences."""
        sums = self._reduced()
        self._sums = {}
        return sums, int(sums.pop("sequences", 0))

    def _reduced(self) -> dict[str, Tensor]:
        assert self._trainer is not None
        strategy = self._trainer.strategy
        reduced: dict[str, Tensor] = {}
        for key, value in self._sums.items():
            copy = value.clone()  # Lightning reduces in place
            reduced[key] = strategy.reduce(copy, reduce_op="sum")  # type: ignore[assignment]
        return reduced

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of all devices over complete steps; a collective."""
        if self._trainer is None:
            return {"sums": {}}
        return {"sums": self._reduced()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the sums of the checkpoint, see `on_train_start`."""
        self._sums = dict(state_dict["sums"])
        self._is_restored = True


def sequences_in(batch: Any) -> int:
    """Return the number of sequences of a batch of tokens; other batches count as one."""
    if isinstance(batch, Tensor):
        return len(batch)
    return 1


def _added(sums: dict[str, Tensor], values: dict[str, Tensor]) -> dict[str, Tensor]:
    # checkpoints of earlier versions have fewer keys
    return {key: value + sums.get(key, 0) for key, value in values.items()}
