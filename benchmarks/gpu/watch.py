"""Callback for the report's runs, which kills a run at a step and counts host synchronizations."""

import os
import signal
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import torch

from benchmarks.gpu.process import write_json

#: step at which a run is killed, if set, and the output file of the counts
KILL = "LIGHTNING_SV_KILL_AT"
COUNTS = "LIGHTNING_SV_COUNTS"


class Watch(L.Callback):
    """Count synchronizations between two steps, reported by torch as warnings, and time them.

    Args:
        first: optimizer step after which counting starts, after compilation and a checkpoint.
        last: last counted step.
    """

    def __init__(self, first: int = 11, last: int = 19):
        self.first = first
        self.last = last
        self.kill_at = int(os.environ.get(KILL, 0))
        self.places: Counter[str] = Counter()
        self.batches = 0
        self._before: Any = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Start listening."""
        if (
            self._before is None
            and self.first <= trainer.global_step < self.last
            and COUNTS in os.environ
        ):
            self._before = warnings.showwarning
            warnings.simplefilter("always")
            warnings.showwarning = self._note
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("warn")
            self._began = time.perf_counter()
        self.batches += self._before is not None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Kill the run, or write the counts, at the right step."""
        if self.kill_at and trainer.global_step >= self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._before is not None and trainer.global_step >= self.last:
            steps = self.last - self.first
            seconds = time.perf_counter() - self._began
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = self._before
            self._before = None
            total = sum(self.places.values())
            counted = {
                "synchronizations": total,
                "steps": steps,
                "micro_batches": self.batches,
                "seconds": seconds,
            }
            counted |= {"a_micro_batch": total / self.batches, "a_step": total / steps}
            write_json(
                Path(os.environ[COUNTS]), counted | {"places": dict(self.places.most_common(12))}
            )

    def _note(self, message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        if "called a synchronizing" in str(
            message
        ):  # ignores the warning that the mode is a prototype
            short = "/".join(Path(filename).parts[-3:])
            self.places[f"{short}:{lineno}"] += 1
