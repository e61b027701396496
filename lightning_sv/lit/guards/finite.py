"""Detection of losses and gradients that are not finite."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from lightning_sv.atomic import regular
from lightning_sv.corpus import TokenLoader
from lightning_sv.errors import RunError
from lightning_sv.optim import full_tensor
from lightning_sv.runs.directory import NONFINITE
from lightning_sv.runs.provenance import Provenance


class FiniteGuard(L.Callback):
    """Check losses and gradient norm before every optimizer step, and stop before a wrong one.

    The check is the only host synchronization of a step, with one reduction and one copy, and other
    callbacks can agree on a flag in it.

    A line of <run_dir>/nonfinite.jsonl identifies the batch: step, epoch, the sequence numbers in
    the training split, the losses of the micro-batches per device, the gradient norm, commit, date
    and machine.

    Attributes:
        norm: gradient norm of the last step before clipping, as a number
        gradient_norm: the same on the device, sharded if the gradients are; None before the first
        stops: whether a device asked to stop before the last step; None if no step was checked
    """

    def __init__(self) -> None:
        self.norm: float | None = None
        self.gradient_norm: Tensor | None = None
        self.stops: bool | None = None
        self._asked_to_stop: Callable[[], bool] | None = None
        self._losses: list[Tensor] = []  # of the micro-batches since the last step

    def agree_on_stop(self, asked: Callable[[], bool]) -> None:
        """Compare `asked` on all devices in every check, for `stops`."""
        self._asked_to_stop = asked

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forget a step that an earlier fit did not finish."""
        self._losses.clear()

    def on_before_backward(
        self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor
    ) -> None:
        """Note the loss of a micro-batch, which Lightning has divided by their number."""
        divisor = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        self._losses.append(loss.detach() * divisor)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        """Check before a step that all losses and the gradient norm are finite on all devices.

        Raises:
            RunError: a value is not finite
        """
        gradients = [
            parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None
        ]
        self.gradient_norm = get_total_norm(gradients, foreach=True)
        norm = full_tensor(self.gradient_norm)
        losses = torch.stack(self._losses) if self._losses else norm.new_empty(0)
        self._losses.clear()

        is_finite, self.norm = self._agree(trainer, losses, norm)
        if not is_finite:
            event = self._event(trainer, losses)
            _append_to_file(trainer, event)
            raise RunError(_message(trainer, event))

    def _agree(self, trainer: L.Trainer, losses: Tensor, norm: Tensor) -> tuple[bool, float]:
        """Return whether all values are finite on all devices, and the norm; set `stops`."""
        # The norm of the reduced gradient is the same everywhere; losses differ between devices.
        is_finite = torch.isfinite(losses).all() & torch.isfinite(norm)
        asked = self._asked_to_stop is not None and self._asked_to_stop()
        goes_on = torch.full_like(norm, not asked, dtype=torch.float32)
        flags = torch.stack((is_finite.float(), goes_on))
        if trainer.world_size > 1:  # the strategy's reduction would add a barrier
            torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MIN)
        numbers = torch.cat((flags.double(), norm.double().unsqueeze(0)))
        all_finite, continues, value = numbers.tolist()  # one copy
        self.stops = not continues
        return bool(all_finite), value

    def _event(self, trainer: L.Trainer, losses: Tensor) -> dict[str, Any]:
        """Return a description of the step and its batch; a collective."""
        all_losses = trainer.strategy.all_gather(losses).flatten()
        event: dict[str, Any] = {"step": trainer.global_step, "epoch": trainer.current_epoch}
        loader = trainer.train_dataloader
        if isinstance(loader, TokenLoader):
            event["epoch"], position = loader.position()
            event["blocks"] = loader.order.sequences(event["epoch"], position)
        event["grad_norm"] = _plain(self.norm or 0.0)
        event["losses"] = [_plain(loss) for loss in all_losses.tolist()]
        return event | Provenance.now()._asdict()


def _append_to_file(trainer: L.Trainer, event: dict[str, Any]) -> None:
    """Append an event to the file of the run, if the Trainer has a folder for logs."""
    folder = trainer.log_dir  # a collective
    if trainer.is_global_zero and folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with regular(Path(folder) / NONFINITE).open("a") as file:
            file.write(json.dumps(event) + "\n")


def _message(trainer: L.Trainer, event: dict[str, Any]) -> str:
    hint = "Lower the learning rate."
    if trainer.global_step == 0:
        hint = "This is the first step, so check model.backbone.init_std and model.init_from."
    if "blocks" in event and trainer.log_dir:
        hint += f" {Path(trainer.log_dir) / NONFINITE} identifies the batch."
    step = trainer.global_step + 1
    values = f"loss {event['losses']}, gradient norm {event['grad_norm']} before step {step}"
    return f"{values}; expected finite values, so the step was not taken. {hint}"


def _plain(value: float) -> float | str:
    """Return a number as JSON can hold it."""
    return value if math.isfinite(value) else str(value)
