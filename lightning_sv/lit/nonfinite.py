"""A loss or gradient that is not finite never reaches the weights."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_sv.atomic import regular
from lightning_sv.corpus import TokenLoader
from lightning_sv.errors import RunError
from lightning_sv.runs.directory import NONFINITE


class NonFiniteError(RunError):
    """A loss or gradient is not finite; nothing was stepped on."""


class NonFinite:
    """Looks at every step's losses and gradient norm before the step, and stops or skips.

    Each event is a line of <run_dir>/nonfinite.jsonl that identifies the batch: step, epoch, the numbers of its
    sequences in the training split, the losses of the micro-batches, device by device, and the gradient's norm.

    Args:
        skip: leave the step out instead of stopping. What is left out is not random, so a comparison of
            runs that skipped is biased; the number of skipped steps is in the summary
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

    def forget(self) -> None:
        """Drop the losses of the step under way."""
        self._losses = []

    def check(self, module: Any, norm: Tensor) -> float:
        """Before a step: every loss and the norm of the whole gradient must be finite, on all devices alike.

        Returns the norm, and tells the module whether any device was asked to stop. This is where the host waits for
        the device, once a step: all that it needs to know comes in one reduction and one copy. (The fused AdamW could
        leave a step out by itself, and the host look later; but a run that is to stop would then have moved on.)

        Raises:
            NonFiniteError: one is not, and steps are not skipped
        """
        losses, self._losses = torch.stack(self._losses), []
        trainer = module.trainer
        # The norm is of the reduced gradient, the same everywhere; a loss is this device's own.
        fine = torch.isfinite(losses).all() & torch.isfinite(norm)
        flags = torch.stack((fine.float(), torch.full_like(norm, not module.stop_asked, dtype=torch.float32)))
        if trainer.world_size > 1:  # the strategy's own reduction would hold the host at a barrier
            torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MIN)
        *flags_here, value = torch.cat((flags.double(), norm.double().unsqueeze(0))).tolist()
        self.skipped_now, module.stop_asked = (not flag for flag in flags_here)
        if not self.skipped_now:
            return float(value)
        losses, folder = trainer.strategy.all_gather(losses).flatten(), trainer.log_dir  # collectives, both
        event = {"step": trainer.global_step, **_identity(trainer), "grad_norm": _plain(value)}
        event["losses"] = [_plain(loss) for loss in losses.tolist()]
        if trainer.is_global_zero and folder:
            with regular(Path(folder) / NONFINITE).open("a") as file:
                file.write(json.dumps(event) + "\n")
        what = f"loss {event['losses']}, gradient norm {event['grad_norm']} before step {trainer.global_step + 1}"
        if not self.skip:
            where = f"{NONFINITE} in the run directory identifies the batch"
            advice = "lower model.optim.lr, or leave such steps out with --model.nonfinite skip"
            if not trainer.global_step:
                advice = "no step was taken yet, so look at the first weights: model.backbone.init_std, model.init_from"
            raise NonFiniteError(f"{what}: not finite, and not stepped on. {where}; {advice}.")
        self.skipped += 1
        for parameter in module.parameters():
            parameter.grad = None  # optimizers leave such parameters, and their state, as they are
        return float(value)


def _identity(trainer: Any) -> dict[str, Any]:
    """Epoch and numbers of the sequences of the step under way."""
    loader = trainer.train_dataloader
    if not isinstance(loader, TokenLoader):
        return {"epoch": trainer.current_epoch}
    epoch, step = loader.position()
    return {"epoch": epoch, "blocks": loader.order.sequences(epoch, step)}


def _plain(value: float) -> float | str:
    """A number as JSON knows it, else its name."""
    return value if math.isfinite(value) else str(value)
