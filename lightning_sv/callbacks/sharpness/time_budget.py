"""The share of a run's time that measurements may take, also over resumes."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any


@dataclass
class Spent:
    """What the measurements of a run cost so far; part of its checkpoints.

    Attributes:
        done: number of measurements
        skipped: number of those left out, because they would have exceeded the budget
        spent: seconds of measurements
        run: seconds of the run, without the current segment
    """

    done: int = 0
    skipped: int = 0
    spent: float = 0.0
    run: float = 0.0


class TimeBudget:
    """Decide whether the next measurement still fits.

    Args:
        share: maximum share of measurements in the run's time
    """

    def __init__(self, share: float):
        self.share = share
        self.clock: Callable[[], float] = time.perf_counter
        self.so_far = Spent()
        self._began: float | None = None

    def start(self, *, is_new: bool) -> None:
        """Begin to count; `is_new` if no checkpoint was loaded for this run."""
        if is_new:
            self.so_far = Spent()
        self._began = self.clock()

    def elapsed(self) -> float:
        """Return the seconds of the run, with its earlier segments."""
        segment = 0.0 if self._began is None else self.clock() - self._began
        return self.so_far.run + segment

    def affords(self, step: int, total: int) -> bool:
        """Return True if a measurement at this step fits; the first and the last always do."""
        done = self.so_far.done
        is_at_end = step >= total  # a batch may complete several steps
        if step == 0 or is_at_end or not done:
            return True
        training = (self.elapsed() - self.so_far.spent) * total / step  # of the complete run
        mean = self.so_far.spent / done
        measuring = self.so_far.spent + 2 * mean  # this measurement, and the last one
        return measuring <= self.share * (training + measuring)

    def measured(self, seconds: float) -> None:
        """Count one measurement."""
        self.so_far.done += 1
        self.so_far.spent += seconds

    def restore(self, state: dict[str, Any]) -> None:
        """Go on with the state of a checkpoint; earlier versions wrote more keys."""
        values = {field.name: state[field.name] for field in fields(Spent)}
        self.so_far = Spent(**values)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        return asdict(replace(self.so_far, run=self.elapsed()))
