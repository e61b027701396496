"""The share of a run's time that measurements may take, also over resumes."""

import time
from collections.abc import Callable
from typing import Any


class TimeBudget:
    """Decide whether the next measurement still fits.

    Args:
        share: maximum share of measurements in the run's time

    Attributes:
        done: number of measurements
        skipped: number of those left out, because they would have exceeded the budget
        spent: seconds of the measurements
    """

    def __init__(self, share: float):
        self.share = share
        self.clock: Callable[[], float] = time.perf_counter
        self._began: float | None = None
        self._reset()

    def _reset(self) -> None:
        self.done = 0
        self.skipped = 0
        self.spent = 0.0
        self._earlier = 0.0  # seconds of the run before the current segment

    def start(self, *, is_new: bool) -> None:
        """Begin to count; `is_new` if no checkpoint was loaded for this run."""
        if is_new:
            self._reset()
        self._began = self.clock()

    def elapsed(self) -> float:
        """Return the seconds of the run, with its earlier segments."""
        segment = 0.0 if self._began is None else self.clock() - self._began
        return self._earlier + segment

    def affords(self, step: int, total: int) -> bool:
        """Return True if a measurement at this step fits; the first and the last always do."""
        is_at_end = step >= total  # a batch may complete several steps
        if step == 0 or is_at_end or not self.done:
            return True
        training = (self.elapsed() - self.spent) * total / step  # of the complete run
        mean = self.spent / self.done
        measuring = self.spent + 2 * mean  # this measurement, and the last one
        return measuring <= self.share * (training + measuring)

    def measured(self, seconds: float) -> None:
        """Count one measurement."""
        self.done += 1
        self.spent += seconds

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        return {
            "done": self.done,
            "skipped": self.skipped,
            "spent": self.spent,
            "run": self.elapsed(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on with the state of a checkpoint; earlier versions wrote more keys."""
        self.done = state["done"]
        self.skipped = state["skipped"]
        self.spent = state["spent"]
        self._earlier = state["run"]
