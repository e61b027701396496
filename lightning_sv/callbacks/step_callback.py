"""Base of callbacks that measure a run at some of its optimizer steps, and log figures.

A subclass defines `act`, and logs figures with `write`. It acts after every n-th step, after its
`chosen_steps`, and after the last step. Step 0, before training, counts as an n-th step.
"""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import lightning as L
from torch import Tensor

from lightning_sv.callbacks.logging import write_scalars
from lightning_sv.callbacks.steps import StepTrigger
from lightning_sv.errors import expect, expect_number


class StepCallback(L.Callback):
    """Callback that acts at some steps of a run, on every device.

    Args:
        every_n_steps: optimizer steps between two acts; None for `chosen_steps` only
        model: dotted name of the submodule that is measured; None to find it

    Raises:
        ConfigError: every_n_steps is below 1
    """

    #: first part of the tags of its figures
    tag: ClassVar[str]

    def __init__(self, every_n_steps: int | None = None, model: str | None = None):
        self.name = type(self).__name__
        self.model = model
        self._clock = StepTrigger(f"every_n_steps of {self.name}", every_n_steps)

    def act(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Measure and write; called on every device, because a sharded model needs all of them."""
        raise NotImplementedError

    def chosen_steps(self, trainer: L.Trainer) -> Collection[int]:
        """Return steps of the run after which the callback acts."""
        return ()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Choose the steps; act before the first step, unless the run is resumed."""
        self._clock.start(trainer, self.chosen_steps(trainer))
        if trainer.global_step == 0 and self._clock.is_due(0):
            self.act(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Act if the batch completed a step that is due."""
        if self._clock.ended(trainer) and self._clock.is_due(trainer.global_step):
            self.act(trainer, pl_module)

    def write(self, trainer: L.Trainer, figures: Mapping[str, float | Tensor]) -> None:
        """Log numbers and scalar tensors as 'TAG/KEY'; a collective if sharded."""
        write_scalars(trainer, {f"{self.tag}/{key}": value for key, value in figures.items()})

    def expect_at_least(self, key: str, value: int, least: int) -> None:
        """Raise ConfigError if an argument is no integer, or too small."""
        argument = f"{key} of {self.name}"
        expect_number(argument, value, int)
        expect(value >= least, argument, value, f"at least {least}.")
