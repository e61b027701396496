"""Progress bar over optimizer steps: loss, learning rate, tokens/s, time left."""

import math
import sys
import time
from typing import Any, TextIO

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lightning_sv.callbacks.run_state import StepTrigger, data_of, settings_of, validates_now
from lightning_sv.callbacks.training_monitor import TrainingMonitor
from lightning_sv.log import is_quiet


class RunProgress(ProgressBar):
    """A progress bar on a terminal, otherwise occasional lines for logs.

    Args:
        lines: number of lines per run without a terminal
    """

    def __init__(self, lines: int = 40):
        super().__init__()
        self.lines = max(1, lines)
        self.stream: TextIO | None = None  # None: stdout as it is when the run starts
        self._enabled = not is_quiet()
        self._bar: Progress | None = None
        self._clock = StepTrigger("progress")
        self._began = (0.0, 0)
        self._waits = False  # a line is delayed until the validation has ended

    def disable(self) -> None:
        """Hide the bar (ranks other than 0)."""
        self._enabled = False

    def enable(self) -> None:
        """Show the bar."""
        self._enabled = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the bar."""
        self._began = (time.perf_counter(), trainer.global_step)
        self._clock.start(trainer)
        self._clock.every = math.ceil((self._clock.last or 1000) / self.lines)
        settings = settings_of(pl_module)
        console = Console(file=self.stream or sys.stdout)
        if not self._enabled or not console.is_terminal:
            return
        name = TextColumn(f"[bold]{escape(type(pl_module).__name__ if settings is None else settings.label)}")
        columns = name, BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("{task.fields[text]}")
        self._bar = Progress(*columns, TimeRemainingColumn(), console=console, expand=True)
        self._task = self._bar.add_task("fit", total=self._clock.last, completed=trainer.global_step, text="")
        self._bar.start()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Update the bar, or print a line."""
        if not self._enabled or not self._clock.ended(trainer):
            return
        step = trainer.global_step
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=_text(trainer))
        elif self._clock.is_due(step):
            self._waits = validates_now(trainer)
            if not self._waits:
                self._line(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show the validation loss."""
        if self._bar is not None:
            self._bar.update(self._task, text=_text(trainer))
        if self._waits:
            self._waits = False
            self._line(trainer)

    def _line(self, trainer: L.Trainer) -> None:
        step, data = trainer.global_step, data_of(trainer)
        parts = [f"step {step}" if self._clock.last is None else f"step {step}/{self._clock.last}"]
        parts += [] if data is None else [f"tokens {step * data.tokens_per_step:,}"]
        parts.append(_text(trainer))
        if self._clock.last is not None:
            seconds = (time.perf_counter() - self._began[0]) / max(1, step - self._began[1])
            minutes, rest = divmod(int(seconds * (self._clock.last - step)), 60)
            parts.append(f"left {minutes}:{rest:02d}")
        print("  ".join(parts), file=self.stream or sys.stdout, flush=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Close the bar, so that the error message is readable."""
        self.on_train_end(trainer, pl_module)


def _text(trainer: L.Trainer) -> str:
    monitor = next((c for c in trainer.callbacks if isinstance(c, TrainingMonitor)), None)  # type: ignore[attr-defined]
    parts = {
        "loss {:.3f}": getattr(monitor, "last_loss", None),
        "val {:.3f}": getattr(monitor, "val_loss", None),
        "lr {:.1e}": getattr(monitor, "lr", None),
        "{:,.0f} tok/s": getattr(monitor, "tokens_per_s", None),
    }
    return "  ".join(part.format(value) for part, value in parts.items() if value is not None)
