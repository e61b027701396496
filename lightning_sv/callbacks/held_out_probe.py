"""Base of callbacks that measure a model on held-out sequences during a run."""

from typing import Any

import lightning as L
from torch import Tensor, nn

from lightning_sv.callbacks.run_state import StepTrigger, data_of, known_steps, model_of, settings_of
from lightning_sv.callbacks.training_monitor import measuring, write_scalars
from lightning_sv.errors import ConfigError
from lightning_sv.scale.shapes import Int
from lightning_sv.settings.data import DataConfig


class HeldOutProbe(L.Callback):
    """Measure the model on the same held-out sequences, at evenly spaced steps of a run.

    A measurement samples no random numbers, and changes neither weights nor gradients. A subclass defines `measure`.

    Args:
        points: number of measurements in a run, the last at its end
        sequences: number of held-out sequences per measurement, spread evenly over the validation split
        model: dotted name of the submodule that maps token ids to logits; null for our backbone, or the module itself

    Raises:
        ConfigError: a value below 1
    """

    def __init__(self, points: int, sequences: int, model: str | None):
        self.name = type(self).__name__
        for key, value in (("points", points), ("sequences", sequences)):
            if value < 1:
                raise ConfigError(f"{key} of {self.name} is {value}; expected at least 1.")
        self.points, self.sequences, self.model = points, sequences, model
        self._clock = StepTrigger(self.name)
        self._block: Tensor | None = None

    def measure(
        self, model: nn.Module, block: Int[Tensor, "B S"], data: DataConfig, eot: int | None
    ) -> dict[str, float]:
        """Return the scalars of `model`, in evaluation mode, on (B, T + 1) held-out token ids.

        `eot` is the id of the end-of-text token if attention is restricted to a document.
        """
        raise NotImplementedError

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check before training that the data are token batches.

        Raises:
            ConfigError: they are not
        """
        if stage == "fit" and data_of(trainer) is None:
            raise ConfigError(f"datamodule is {trainer.datamodule!r}; expected a TokenDataModule for {self.name}.")  # type: ignore[attr-defined]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Read the sequences."""
        self._clock.start(trainer)
        self._clock.every = max(1, known_steps(trainer, self.name) // self.points)
        data = data_of(trainer)
        assert data is not None
        self._block = data.held_out(self.sequences).to(pl_module.device)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure when due, on every device, because a sharded model needs all of them."""
        if not self._clock.ended(trainer) or not self._clock.is_due(trainer.global_step):
            return
        data, settings = data_of(trainer), settings_of(pl_module)
        assert self._block is not None and data is not None
        model = model_of(pl_module, self.model)
        was_training = model.training
        eot = data.eot if settings is not None and settings.mask_documents else None
        with measuring(trainer), trainer.precision_plugin.forward_context():
            scalars = self.measure(model.eval(), self._block, data, eot)
        model.train(was_training)
        write_scalars(trainer, scalars)
