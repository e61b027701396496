"""Base of callbacks that measure a model on held-out sequences during a run."""

from typing import Any

import lightning as L
from torch import Tensor, nn

from lightning_sv.callbacks.logging import measuring, write_scalars
from lightning_sv.callbacks.run_state import (
    StepTrigger,
    data_of,
    evaluation_mode,
    known_steps,
    model_of,
    settings_of,
)
from lightning_sv.errors import ConfigError, expect
from lightning_sv.scale.shapes import Int


class HeldOutProbe(L.Callback):
    """Measure the model on the same held-out sequences, at evenly spaced steps of a run.

    A measurement samples no random numbers, and changes neither weights nor gradients. A subclass
    defines `measure`, and documents the arguments.
    """

    def __init__(self, points: int, sequences: int, model: str | None):
        self.name = type(self).__name__
        expect(points >= 1, f"points of {self.name}", points, "at least 1.")
        expect(sequences >= 1, f"sequences of {self.name}", sequences, "at least 1.")
        self.points = points
        self.sequences = sequences
        self.model = model
        self._clock = StepTrigger(self.name)
        self._steps: frozenset[int] = frozenset()
        self._block: Tensor | None = None

    def measure(
        self, model: nn.Module, block: Int[Tensor, "B S"], eot: int | None
    ) -> dict[str, float]:
        """Return the scalars of `model`, in evaluation mode, on (B, T + 1) held-out token ids.

        `eot` is the id of the end-of-text token if attention is restricted to a document.
        """
        raise NotImplementedError

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check before training that the data are token batches; raise ConfigError otherwise."""
        if stage == "fit" and data_of(trainer) is None:
            found = repr(trainer.datamodule)  # type: ignore[attr-defined]
            expected = f"a TokenDataModule for {self.name}."
            raise ConfigError(f"datamodule is {found}; expected {expected}")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Read the sequences."""
        self._clock.start(trainer)
        total = known_steps(trainer, self.name)
        self._steps = frozenset(i * total // self.points for i in range(1, self.points + 1))
        data = data_of(trainer)
        assert data is not None
        self._block = data.held_out(self.sequences).to(pl_module.device)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure when due, on every device, because a sharded model needs all of them."""
        if self._clock.ended(trainer) and self._clock.has_passed(self._steps):
            self._measure_now(trainer, pl_module)

    def _measure_now(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data = data_of(trainer)
        settings = settings_of(pl_module)
        assert self._block is not None and data is not None
        model = model_of(pl_module, self.model)
        masks_documents = settings is not None and settings.mask_documents
        eot = data.manifest.eot if masks_documents else None
        forward_context = trainer.precision_plugin.forward_context()
        with measuring(trainer), forward_context, evaluation_mode(model):
            scalars = self.measure(model, self._block, eot)
        write_scalars(trainer, scalars)
