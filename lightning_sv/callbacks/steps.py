"""Optimizer steps of a run: their number, and those at which a callback acts."""

import math
from collections.abc import Collection
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_sv.callbacks.run_state import callbacks_of
from lightning_sv.errors import ConfigError, expect


def total_steps(trainer: L.Trainer) -> int | None:
    """Return the number of optimizer steps of the run; None if it is not known.

    It is not if only `max_time` ends the run. Without `max_steps` it is also not known if several
    optimizers step, or a callback changes the accumulation, which Lightning's number ignores.
    """
    has_limit = trainer.max_steps >= 0
    if not has_limit and _steps_vary(trainer):
        return None
    total = trainer.estimated_stepping_batches  # -1 or infinity if it is not known
    if 0 <= total < math.inf:
        return int(total)
    return None


def _steps_vary(trainer: L.Trainer) -> bool:
    """Return True if the batches of an epoch do not tell its optimizer steps."""
    schedulers = callbacks_of(trainer, GradientAccumulationScheduler)
    return bool(schedulers) or len(trainer.optimizers) > 1


def is_at_end(trainer: L.Trainer) -> bool:
    """Return True after the last step of the run; False if the number of its steps is not known."""
    total = total_steps(trainer)
    return total is not None and trainer.global_step >= total


def known_steps(trainer: L.Trainer, callback: str) -> int:
    """Return the number of optimizer steps of the run, which `callback` needs.

    Raises:
        ConfigError: only time ends the run
    """
    total = total_steps(trainer)
    if total is None:
        expected = f"a number of steps, which {callback} needs"
        raise ConfigError(f"max_steps is {trainer.max_steps}; expected {expected}.")
    return total


def log_spaced(total: int, n: int) -> list[int]:
    """Return at most n steps: 0, and geometrically spaced steps from 1% of the run to its end.

    >>> log_spaced(1000, 5)
    [0, 10, 46, 215, 1000]
    """
    if n < 3:
        return [0, total]
    first = max(1.0, total / 100)
    ratio = total / first
    steps = {round(first * ratio ** (i / (n - 2))) for i in range(n - 1)}
    return sorted({0, *steps})


def validates_now(trainer: L.Trainer) -> bool:
    """Return True if a validation follows the current step."""
    if not trainer.enable_validation:
        return False
    if trainer.global_step >= trainer.max_steps > 0:
        return True
    every: Any = trainer.val_check_batch
    if every is None or not math.isfinite(every):
        return False
    batches = trainer.global_step * trainer.accumulate_grad_batches
    return batches % every == 0


class StepTrigger:
    """Count optimizer steps for a callback that Lightning calls after every micro-batch.

    The callback acts after every n-th step, after chosen steps, and after the last one. A batch may
    complete several steps, and then any of them can be due.

    Args:
        key: name of `every_n_steps` in the config
        every_n_steps: optimizer steps between two acts; None for chosen steps only

    Raises:
        ConfigError: every_n_steps is below 1
    """

    def __init__(self, key: str, every_n_steps: int | None = None):
        if every_n_steps is not None:
            expect(every_n_steps >= 1, key, every_n_steps, "at least 1.")
        self.every = every_n_steps
        self.chosen: frozenset[int] = frozenset()
        #: last completed step
        self.step = 0
        #: last step of the batch before: the last batch completed all steps after it, up to `step`
        self.previous = -1
        #: last step of the run; None if it ends by time only
        self.last: int | None = None

    def start(self, trainer: L.Trainer, chosen: Collection[int] = ()) -> None:
        """Set the first step of a new or resumed run, and the chosen steps."""
        self.step = trainer.global_step
        self.previous = trainer.global_step - 1
        self.last = total_steps(trainer)
        self.chosen = frozenset(map(round, chosen))  # e.g. of np.linspace
        if self.last is not None:
            self.chosen |= {self.last}

    def ended(self, trainer: L.Trainer) -> bool:
        """Return True if the last micro-batch completed a step; True once per step."""
        if trainer.global_step == self.step:
            return False
        self.previous = self.step
        self.step = trainer.global_step
        return True

    def is_due(self, step: int) -> bool:
        """Return True if the callback acts after this step, the last completed one or a later."""
        previous = step - 1
        if step == self.step:
            previous = self.previous
        if not self.chosen.isdisjoint(range(previous + 1, step + 1)):
            return True
        if self.every is None:
            return False
        return step // self.every > previous // self.every

    def is_at_end(self) -> bool:
        """Return True if the last step of the run is completed."""
        return self.last is not None and self.step >= self.last
