"""Triggers of callbacks: the end of an optimizer step, and the steps that are due."""

import lightning as L

from lightning_sv.callbacks.run_state import total_steps
from lightning_sv.errors import ConfigError


class StepTrigger:
    """Count optimizer steps for a callback that Lightning calls after every micro-batch.

    Args:
        key: name of the callback's setting, for errors
        every_n_steps: interval of the steps that are due; the last step of a run always is

    Raises:
        ConfigError: every_n_steps is below 1
    """

    def __init__(self, key: str, every_n_steps: int = 1):
        if every_n_steps < 1:
            raise ConfigError(f"{key} is {every_n_steps}; expected at least 1.")
        self.every = every_n_steps
        #: last completed step
        self.step = 0
        #: last step of the run; None if it ends by time only
        self.last: int | None = None

    def start(self, trainer: L.Trainer) -> None:
        """Set the first step of a new or resumed run."""
        self.step, self.last = trainer.global_step, total_steps(trainer)

    def ended(self, trainer: L.Trainer) -> bool:
        """Return True if the last micro-batch completed a step; True once per step."""
        ended = trainer.global_step != self.step
        self.step = trainer.global_step
        return ended

    def is_due(self, step: int) -> bool:
        """Return True if the callback acts after this step."""
        return step % self.every == 0 or self.is_last(step)

    def is_last(self, step: int) -> bool:
        """Return True if the run ends with this step."""
        return self.last is not None and step >= self.last
