"""The held-out loss of a `PretrainModule`, measured on an eager float32 copy of its weights.

Training may therefore be compiled, sharded, in bfloat16 and with fused attention. All ranks take
part in gathering the weights, and the first one computes.
"""

import logging
from collections.abc import Collection

import lightning as L
import torch
from torch import Tensor

from lightning_sv.callbacks.held_out_probe import documents_of
from lightning_sv.callbacks.run_state import data_of, has_known_model, model_of, settings_of
from lightning_sv.callbacks.sharpness.batch_size import fitting_length, fitting_sequences
from lightning_sv.callbacks.sharpness.measure import MeasuredLoss, Measurement
from lightning_sv.callbacks.sharpness.model_copy import plain_copy
from lightning_sv.callbacks.sharpness.subsets import parameter_subsets
from lightning_sv.callbacks.sharpness.time_budget import TimeBudget
from lightning_sv.errors import ConfigError
from lightning_sv.nn import Backbone, next_token_loss
from lightning_sv.settings.data import DataConfig
from lightning_sv.settings.model import PretrainConfig

log = logging.getLogger(__name__)


class HeldOutLoss(MeasuredLoss):
    """The loss of one fixed batch, spread over the validation split.

    Args:
        measurement: what is measured, and how
        time: budget of the measurements, which keeps the batch size over resumes
        sequences: batch size; None for the size that fits the budget by the run's plan
    """

    def __init__(self, measurement: Measurement, time: TimeBudget, sequences: int | None):
        self.measurement = measurement
        self.time = time
        self.sequences = sequences
        self._blocks = Tensor()  # sequences T+1, on rank 0 from the start of training

    def planned_model(self, trainer: L.Trainer, module: L.LightningModule) -> Backbone:
        """Return the backbone without storage.

        Raises:
            ConfigError: a module or data without a default loss
        """
        if not has_known_model(trainer, module):
            expected = "a function of the LightningModule."
            hint = "Only a PretrainModule with a TokenDataModule has a default."
            raise ConfigError(f"loss of Sharpness is None; expected {expected} {hint}")
        return _settings(module).plan.meta()

    def start(self, trainer: L.Trainer, module: L.LightningModule, steps: Collection[int]) -> None:
        """Read the batch, whose size follows from the run's plan."""
        data = _data(trainer)
        backbone = _settings(module).backbone
        length = fitting_length(backbone, data.seq_len)

        # A validation pass costs a third of a training pass. One device measures while the others
        # wait.
        validation = data.validations * (data.val_sequences or 0) / 3
        run = max(steps) * data.global_batch + validation
        work = self.time.share * run / trainer.world_size * data.seq_len / length
        fitting = fitting_sequences(backbone, length, work, len(steps), self.measurement)
        resumed = self.time.so_far.sequences  # a resumed run keeps its batch size
        self.time.so_far.sequences = self.sequences or resumed or fitting
        if trainer.is_global_zero:
            blocks = data.held_out(self.time.so_far.sequences)[:, : length + 1]
            self._blocks = blocks.to(module.device)
            self.time.so_far.sequences = len(blocks)
            self._log_plan(len(steps), length, data.seq_len)

    def _log_plan(self, points: int, length: int, seq_len: int) -> None:
        batch = f"{points} measurements of {len(self._blocks)} held-out sequences"
        if length < seq_len:
            reason = f"math attention on {seq_len:,} is too large"
            batch += f", of their first {length:,} tokens ({reason})"
        log.info("sharpness: %s; math attention, on an eager float32 copy", batch)

    def figures(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, float]:
        """Measure on the first rank; other ranks return nothing."""
        meta = _settings(module).plan.meta()
        model = plain_copy(model_of(module), meta, module.device, keep=trainer.is_global_zero)
        if model is None:
            return {}
        tokens = self._blocks[:, :-1]  # B T
        targets = self._blocks[:, 1:]  # B T
        documents = documents_of(tokens, trainer, module)

        def loss() -> Tensor:
            return next_token_loss(model(tokens, documents), targets)

        with torch.autocast(module.device.type, enabled=False):
            figures = self.measurement.figures(parameter_subsets(model), loss)
        return figures | {"sequences": len(self._blocks)}


def _settings(module: L.LightningModule) -> PretrainConfig:
    settings = settings_of(module)
    assert settings is not None, "planned_model comes first"
    return settings


def _data(trainer: L.Trainer) -> DataConfig:
    data = data_of(trainer)
    assert data is not None, "planned_model comes first"
    return data
