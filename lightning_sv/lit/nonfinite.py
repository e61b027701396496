"""Detection of losses and gradients that are not finite."""

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
from lightning_sv.runs.provenance import Provenance


class NonFinite:
    """Check losses and gradient norm before every optimizer step, and stop or skip the step.

    Each event is a line of <run_dir>/nonfinite.jsonl that identifies the batch: step, epoch, the sequence numbers
    in the training split, the losses of the micro-batches per device, and the gradient norm; if it stops the run, also
    commit, date and machine. Skipped steps are not random, so a comparison of such runs is biased; their number is in
    the summary.
    """

    def __init__(self, skip: bool):
        self.skip = skip
        self.skipped = 0
        self.skipped_now = False
        #: losses of the micro-batches since the last step
        self.losses: list[Tensor] = []

    def check(self, module: Any, norm: Tensor, *, scaled: bool = False) -> float:
        """Check before a step that all losses and the gradient norm are finite on all devices.

        Returns the norm, and sets whether any device was asked to stop. This is the only host synchronization of a
        step, with one reduction and one copy. (The fused AdamW could skip a step by itself and the host check later,
        but a run that should stop would have continued by then.) With `scaled`, for a gradient scaler of float16, only
        the losses are checked, because the scaler skips steps whose gradient overflows.

        Raises:
            RunError: a value is not finite, and steps are not skipped
        """
        # The training_step of a subclass may not append its losses; then only the norm is checked.
        losses, self.losses = torch.stack(self.losses) if self.losses else norm.new_empty(0), []
        trainer = module.trainer
        # The norm of the reduced gradient is the same everywhere; losses differ between devices.
        fine = torch.isfinite(losses).all() & (torch.isfinite(norm) | scaled)
        flags = torch.stack((fine.float(), torch.full_like(norm, not module.stop_asked, dtype=torch.float32)))
        if trainer.world_size > 1:  # the strategy's reduction would add a barrier
            torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MIN)
        *flags_here, value = torch.cat((flags.double(), norm.double().unsqueeze(0))).tolist()
        self.skipped_now, module.stop_asked = (not flag for flag in flags_here)
        module.stop_agreed = True
        if not self.skipped_now:
            return float(value)
        losses, folder = trainer.strategy.all_gather(losses).flatten(), trainer.log_dir  # both are collectives
        event: dict[str, Any] = {"step": trainer.global_step, "epoch": trainer.current_epoch}
        if isinstance(loader := trainer.train_dataloader, TokenLoader):
            event["epoch"], position = loader.position()
            event["blocks"] = loader.order.sequences(event["epoch"], position)
        event |= {"grad_norm": _plain(value), "losses": [_plain(loss) for loss in losses.tolist()]}
        event |= {} if self.skip else Provenance.now()._asdict()
        if trainer.is_global_zero and folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with regular(Path(folder) / NONFINITE).open("a") as file:
                file.write(json.dumps(event) + "\n")
        what = f"loss {event['losses']}, gradient norm {event['grad_norm']} before step {trainer.global_step + 1}"
        if not self.skip:
            hint = "Lower the learning rate, or skip such steps: model.nonfinite skip."
            if not trainer.global_step:
                hint = "This is the first step, so check model.backbone.init_std and model.init_from."
            if "blocks" in event and folder:
                hint += f" {Path(folder) / NONFINITE} identifies the batch."
            raise RunError(f"{what}; expected finite values, so the step was not taken. {hint}")
        self.skipped += 1
        for parameter in module.parameters():
            parameter.grad = None  # optimizers skip parameters without a gradient
        return float(value)


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
