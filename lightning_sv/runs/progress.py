"""Progress of a run that a different command started: two numbers in a file of its directory.

    command   names the file in the run's environment   LIGHTNING_SV_PROGRESS=RUN/progress.json
    run       writes it at the steps of its progress lines                         [120, 3000]
    command   reads it for the bar of this run, and removes it when the run has ended

Without the variable nothing is written.
"""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lightning_sv.atomic import write_atomically

#: environment variable with the file that a run writes
PROGRESS_VARIABLE = "LIGHTNING_SV_PROGRESS"


class StepProgress(NamedTuple):
    """Optimizer steps of a run: those that it has taken, and all of them."""

    step: int
    total: int

    @property
    def fraction(self) -> float:
        """Share of the steps that is done."""
        return min(1.0, self.step / max(self.total, 1))


def report_progress(step: int, total: int | None) -> None:
    """Write the progress of this run, if a command asked for it and the length is known."""
    path = os.environ.get(PROGRESS_VARIABLE)
    if path is None or total is None:
        return
    with suppress(OSError):  # a full disk does not end a run
        write_atomically(Path(path), json.dumps([step, total]))


def read_progress(path: Path) -> StepProgress | None:
    """Return the progress in a file; None if the run has not written it yet."""
    try:
        step, total = json.loads(path.read_text())
        return StepProgress(int(step), int(total))
    except (OSError, ValueError, TypeError):
        return None
