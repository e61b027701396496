"""What the callbacks read of the run: its module and its data."""

from typing import Protocol, cast

import lightning as L
import torch
from torch import Tensor

from lightning_sv.nn import Backbone, BackboneConfig
from lightning_sv.scale import ScaleOptions, ScaleStrategy


class SkippedSteps(Protocol):
    """Steps that were left out because a loss or gradient was not finite, and whether the last one was."""

    skipped: int
    skipped_now: bool


class TrainedModule(Protocol):
    """The module that is trained, `lit.module.PretrainModule`.

    Attributes:
        config: sizes of the backbone
        strategy: the scale-vector strategy
        scale_options: its finer choices
        mask_documents: whether attention stays inside a document
        grad_norm: norm of the last gradient before clipping
        step_lr: learning rate of the last step
    """

    config: BackboneConfig
    strategy: ScaleStrategy
    scale_options: ScaleOptions
    mask_documents: bool
    grad_norm: float
    step_lr: float

    @property
    def net(self) -> Backbone:
        """The backbone."""
        ...

    @property
    def nonfinite(self) -> SkippedSteps:
        """How many steps were skipped, and whether the one under way is."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it is."""
        ...

    @property
    def label(self) -> str:
        """Strategy and options, as in run names."""
        ...

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations of forward and backward a token."""
        ...


class TrainedData(Protocol):
    """The data that are read, `lit.data.TokenDataModule`.

    Attributes:
        seq_len: tokens a sequence predicts
        global_batch: sequences an optimizer step
        validations: in a run
        val_sequences: read by each validation; None for all
    """

    seq_len: int
    global_batch: int
    validations: int
    val_sequences: int | None

    @property
    def tokens_per_step(self) -> int:
        """Training tokens of an optimizer step."""
        ...

    @property
    def eot(self) -> int:
        """Id of the end-of-text token."""
        ...

    def held_out(self, n_sequences: int) -> Tensor:
        """Sequences (n, seq_len + 1) of the validation split, the same in every run."""
        ...


def module_of(trainer: L.Trainer) -> TrainedModule:
    """Return the module of a run."""
    return cast(TrainedModule, trainer.lightning_module)


def data_of(trainer: L.Trainer) -> TrainedData:
    """Return the data of a run."""
    return cast(TrainedData, trainer.datamodule)  # type: ignore[attr-defined]


def tokens_seen(trainer: L.Trainer) -> int:
    """Return the training tokens behind the current weights."""
    return trainer.global_step * data_of(trainer).tokens_per_step
