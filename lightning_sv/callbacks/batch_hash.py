"""A hash of every sequence that was trained on, to prove that two runs saw the same data in the same order."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_sv.callbacks.clock import StepClock
from lightning_sv.callbacks.scalars import write_scalars
from lightning_sv.callbacks.trained import TrainedModule, data_of

#: odd 64-bit constants: of splitmix64 (Steele, Lea and Flood, 2014), as signed integers
_A, _B = -0x61C8864680B583EB, -0x40A7B892E31B1A47


class BatchHash(L.Callback):
    """Logs data/batch_hash with the other scalars: 24 bits of a hash over all steps since the first.

    Sum over steps s and their sequences x of mix(mix(s) + sum_j x_j (2 j + 1) A^(j+1)) mod 2^64: it changes with any
    token, its place and its step, but not with the devices, workers or micro-batches that share a step.
    Two runs with the same value at the same step have seen the same steps, but for one chance in 2^24.

    Args:
        every_n_steps: optimizer steps between two writes
    """

    def __init__(self, every_n_steps: int = 10):
        self._clock = StepClock("batch_hash.every_n_steps", every_n_steps)
        self._sum: Tensor | None = None
        self._loaded = 0
        self._trainer: L.Trainer | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: TrainedModule) -> None:
        """Begin, or continue a resumed hash: rank 0 has the sum of all devices."""
        self._trainer = trainer
        self._clock.start(trainer)
        device = pl_module.device
        self._sum = torch.tensor(self._loaded if trainer.is_global_zero else 0, device=device)
        length = data_of(trainer).seq_len + 1
        powers = torch.full((length,), _A, device=device).cumprod(0)
        self._weights = powers * torch.arange(1, 2 * length, 2, device=device)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: TrainedModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the sequences; write every n optimizer steps, and at the last."""
        assert self._sum is not None
        sequences = (batch * self._weights).sum(-1)  # B
        # torch.full is a kernel; torch.tensor would copy from the host, and wait for the device to get there.
        step = torch.full((), self._clock.step, device=batch.device)
        self._sum = self._sum + _mix(sequences + _mix(step)).sum()
        if self._clock.ended(trainer) and self._clock.is_due(trainer, trainer.global_step):
            write_scalars(trainer, {"data/batch_hash": float(self._total() & 0xFFFFFF)})

    def _total(self) -> int:
        if self._sum is None or self._trainer is None:
            return self._loaded
        return int(self._trainer.strategy.reduce(self._sum.clone(), reduce_op="sum"))  # Lightning reduces in place

    def state_dict(self) -> dict[str, Any]:
        """The sum over all devices; to be called by all of them."""
        return {"sum": self._total()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue a saved hash."""
        self._loaded = state_dict["sum"]


def _mix(x: Tensor) -> Tensor:
    """Scramble 64-bit integers, one to one; products wrap around."""
    x = (x ^ (x >> 30)) * _B
    x = (x ^ (x >> 27)) * _A
    return x ^ (x >> 31)
