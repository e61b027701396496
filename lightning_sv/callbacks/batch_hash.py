"""A hash of every sequence that was trained on, to prove that two runs saw the same data in the same order."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_sv.callbacks.scalars import write_scalars
from lightning_sv.callbacks.trained import TrainedModule, data_of
from lightning_sv.callbacks.window import Window

#: odd 64-bit constants: of splitmix64 (Steele, Lea and Flood, 2014), as signed integers
_A, _B = -0x61C8864680B583EB, -0x40A7B892E31B1A47


class BatchHash(Window):
    """Logs data/batch_hash with the other scalars: 24 bits of a hash over all steps since the first.

    Sum over steps s and their sequences x of mix(mix(s) + sum_j x_j (2 j + 1) A^(j+1)) mod 2^64: it changes with any
    token, its place and its step, but not with the devices, workers or micro-batches that share a step.
    Two runs with the same value at the same step have seen the same steps, but for one chance in 2^24.

    Args:
        every_n_steps: optimizer steps between two writes
    """

    def __init__(self, every_n_steps: int = 10):
        super().__init__("batch_hash", every_n_steps)

    def on_train_start(self, trainer: L.Trainer, pl_module: TrainedModule) -> None:
        """Begin, or continue a resumed hash: rank 0 has the sum of all devices."""
        super().on_train_start(trainer, pl_module)
        length = data_of(trainer).seq_len + 1
        powers = torch.full((length,), _A, device=pl_module.device).cumprod(0)
        self._weights = powers * torch.arange(1, 2 * length, 2, device=pl_module.device)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: TrainedModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the sequences; write every n optimizer steps, and at the last."""
        sequences = (batch * self._weights).sum(-1)  # B
        # torch.full is a kernel; torch.tensor would copy from the host, and wait for the device to get there.
        step = torch.full((), self._clock.step, device=batch.device)
        if self.add({"sum": _mix(sequences + _mix(step)).sum()}, len(batch)):
            write_scalars(trainer, {"data/batch_hash": float(self.state_dict()["sum"] & 0xFFFFFF)})

    def state_dict(self) -> dict[str, Any]:
        """The sum over all devices; to be called by all of them."""
        return {"sum": int(self.total()[0]["sum"])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue a saved hash."""
        super().load_state_dict({"sums": {"sum": torch.tensor(state_dict["sum"])}, "count": 0})


def _mix(x: Tensor) -> Tensor:
    """Scramble 64-bit integers, one to one; products wrap around."""
    x = (x ^ (x >> 30)) * _B
    x = (x ^ (x >> 27)) * _A
    return x ^ (x >> 31)
