"""A loss or gradient that is not finite never reaches the weights."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FILENAME = "nonfinite.jsonl"


class NonFiniteError(RuntimeError):
    """A loss or gradient is not finite; nothing was stepped on."""


class NonFinite:
    """Looks at every step's losses and gradient norm before the step, and stops or skips.

    Each event is a line of <run_dir>/nonfinite.jsonl that identifies the batch: step, epoch, the numbers of its
    blocks in the training split, the losses of the micro-batches, device by device, and the gradient's norm.

    Args:
        skip: leave the step out instead of stopping. What is left out is not random, so a comparison of
            runs that skipped is biased; the number of skipped steps is in the summary.
    """

    def __init__(self, skip: bool):
        self.skip = skip
        self.skipped = 0
        #: whether the step that is under way is left out
        self.skipped_now = False
        self._losses: list[Tensor] = []

    def see(self, loss: Tensor) -> None:
        """Keep the loss of a micro-batch until its step."""
        self._losses.append(loss)

    def check(self, module: Any, norm: Tensor) -> None:
        """Before a step: every loss and the norm of the whole gradient must be finite, on all devices alike.

        Raises:
            NonFiniteError: one is not, and steps are not skipped.
        """
        losses, self._losses = torch.stack(self._losses), []
        trainer = module.trainer
        # The norm is of the reduced gradient, the same everywhere; a loss is this device's own.
        finite = torch.isfinite(losses).all() & torch.isfinite(norm)
        fine = bool(finite) if trainer.world_size == 1 else trainer.strategy.reduce_boolean_decision(bool(finite))
        self.skipped_now = not fine
        if fine:
            return
        losses, folder = trainer.strategy.all_gather(losses).flatten(), trainer.log_dir  # collectives, both
        event = {"step": trainer.global_step, **_identity(trainer), "grad_norm": _plain(float(norm))}
        event["losses"] = [_plain(loss) for loss in losses.tolist()]
        if trainer.is_global_zero and folder:
            with (Path(folder) / FILENAME).open("a") as file:
                file.write(json.dumps(event) + "\n")
        what = f"loss {event['losses']}, gradient norm {event['grad_norm']} before step {trainer.global_step + 1}"
        if not self.skip:
            raise NonFiniteError(
                f"{what}: not finite, and not stepped on. {FILENAME} in the run directory identifies the batch; lower "
                "model.optim.lr, or leave such steps out with --model.nonfinite skip."
            )
        self.skipped += 1
        for parameter in module.parameters():
            parameter.grad = None  # optimizers leave such parameters, and their state, as they are


def _identity(trainer: Any) -> dict[str, Any]:
    """Epoch and block numbers of the step under way."""
    loader = trainer.train_dataloader
    epoch, step = loader.position()
    return {"epoch": epoch, "blocks": loader.order.blocks(epoch, step)}


def _plain(value: float) -> float | str:
    """A number as JSON knows it, else its name."""
    return value if math.isfinite(value) else str(value)
