"""What the callbacks read of the run: its module and its data."""

from typing import Protocol, cast

import lightning as L

from lightning_sv.nn import Backbone
from lightning_sv.settings.data import Batches
from lightning_sv.settings.model import Pretraining


class SkippedSteps(Protocol):
    """Steps that were left out because a loss or gradient was not finite, and whether the last one was."""

    skipped: int
    skipped_now: bool


class TrainedModule(Pretraining, L.LightningModule):
    """What is trained, as far as the callbacks know it; `lit.module.PretrainModule` trains it.

    Attributes:
        backbone: None until `configure_model` builds it
        nonfinite: how many steps were skipped, and whether the one under way is
        grad_norm: norm of the last gradient before clipping, over all parameters
        step_lr: learning rate of the last step
    """

    backbone: Backbone | None
    nonfinite: SkippedSteps
    grad_norm: float
    step_lr: float

    @property
    def net(self) -> Backbone:
        """The backbone, which exists from `configure_model` on."""
        assert self.backbone is not None, "configure_model has not run"
        return self.backbone


def module_of(trainer: L.Trainer) -> TrainedModule:
    """Return the module of a run."""
    return cast(TrainedModule, trainer.lightning_module)


def data_of(trainer: L.Trainer) -> Batches:
    """Return the data of a run."""
    return cast(Batches, trainer.datamodule)  # type: ignore[attr-defined]


def tokens_seen(trainer: L.Trainer) -> int:
    """Return the training tokens behind the current weights."""
    return trainer.global_step * data_of(trainer).tokens_per_step


def validates_now(trainer: L.Trainer) -> bool:
    """Whether a validation follows the step that has just ended."""
    every = int(trainer.val_check_interval)  # type: ignore[attr-defined]
    batches = trainer.global_step * trainer.accumulate_grad_batches
    return trainer.global_step >= trainer.max_steps or batches % every == 0
