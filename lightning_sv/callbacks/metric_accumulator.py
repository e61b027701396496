"""Sums over the steps between two writes, which survive a checkpoint and a change of the number of devices."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_sv.callbacks.step_trigger import StepTrigger


class MetricAccumulator(L.Callback):
    """A callback with sums of what micro-batches give, on the device, until its next write.

    Args:
        section: of the callback in the config, for the message
        every_n_steps: optimizer steps between two writes

    Raises:
        ConfigError: every_n_steps is below 1
    """

    def __init__(self, section: str, every_n_steps: int):
        self._clock = StepTrigger(f"{section}.every_n_steps", every_n_steps)
        self._trainer: L.Trainer | None = None
        #: of the step under way, and of the steps since the last write
        self._open: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        #: sequences on this device in `_open` and `_sums`; those of all devices before the last resume
        self._open_count, self._count, self._before = 0, 0, 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin, or continue what a checkpoint held: rank 0 has the sums of all devices, the others start at zero."""
        self._trainer = trainer
        self._clock.start(trainer)
        device = trainer.strategy.root_device
        self._sums = {
            key: value.to(device) if trainer.is_global_zero else torch.zeros_like(value, device=device)
            for key, value in self._sums.items()
        }

    def add(self, values: dict[str, Tensor], sequences: int, *, keep: bool = True) -> bool:
        """Add a micro-batch; return whether it ended a step after which one writes.

        Args:
            values: sums over its sequences; the same keys each time
            sequences: how many it has
            keep: whether the step counts, asked at its end: one that was skipped does not
        """
        assert self._trainer is not None, "on_train_start comes first"
        self._open = {key: self._open[key] + value if self._open else value for key, value in values.items()}
        self._open_count += sequences
        if not self._clock.ended(self._trainer):
            return False
        if keep:
            self._sums = {key: self._sums[key] + value if self._sums else value for key, value in self._open.items()}
            self._count += self._open_count
        self._open, self._open_count = {}, 0
        return self._clock.is_due(self._clock.step)

    def take(self) -> tuple[dict[str, Tensor], int]:
        """Return the sums over micro-batches and devices, with the number of sequences, and start anew."""
        taken = self._total()
        self._sums, self._count, self._before = {}, 0, 0
        return taken

    def _total(self) -> tuple[dict[str, Tensor], int]:
        assert self._trainer is not None
        world, strategy = self._trainer.world_size, self._trainer.strategy
        # A copy, for Lightning reduces in place.
        sums = {key: strategy.reduce(value.clone(), reduce_op="sum") for key, value in self._sums.items()}
        return sums, self._count * world + self._before  # type: ignore[return-value]

    def state_dict(self) -> dict[str, Any]:
        """The sums of all devices; to be called by all of them, after a step."""
        if self._trainer is None:
            return {"sums": {}, "count": 0}
        assert not self._open_count, "inside a step"
        sums, count = self._total()
        return {"sums": sums, "count": count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the window that the checkpoint was in, see `on_train_start`."""
        self._sums, self._count, self._before = dict(state_dict["sums"]), 0, state_dict["count"]
