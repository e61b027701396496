"""When callbacks act: after which micro-batches an optimizer step has ended, and which steps are theirs."""

import lightning as L

from lightning_sv.callbacks.run_state import total_steps
from lightning_sv.errors import ConfigError


class StepTrigger:
    """Counts optimizer steps for one callback, which Lightning calls after every micro-batch.

    Args:
        key: name of the callback's setting in errors
        every_n_steps: distance of the steps that are due; the last one of a run always is

    Raises:
        ConfigError: every_n_steps is below 1
    """

    def __init__(self, key: str, every_n_steps: int = 1):
        if every_n_steps < 1:
            raise ConfigError(f"{key} is {every_n_steps}; expected at least 1.")
        self.every = every_n_steps
        #: steps that have ended
        self.step = 0
        #: the last step of the run; None where only time ends it
        self.last: int | None = None

    def start(self, trainer: L.Trainer) -> None:
        """Begin at the step that a run, or a resumed one, begins at."""
        self.step, self.last = trainer.global_step, total_steps(trainer)

    def ended(self, trainer: L.Trainer) -> bool:
        """Whether the micro-batch before this call ended a step; true once a step."""
        ended = trainer.global_step != self.step
        self.step = trainer.global_step
        return ended

    def is_due(self, step: int) -> bool:
        """Whether the callback acts after this step."""
        return step % self.every == 0 or self.is_last(step)

    def is_last(self, step: int) -> bool:
        """Whether the run ends with this step."""
        return self.last is not None and step >= self.last
