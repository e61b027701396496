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

from lightning_sv.callbacks.run_state import callbacks_of, data_of, settings_of
from lightning_sv.callbacks.steps import StepTrigger, validates_now
from lightning_sv.callbacks.training_monitor import TrainingMonitor
from lightning_sv.log import is_quiet
from lightning_sv.runs.progress import report_progress


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
        self._start_time = 0.0
        self._start_step = 0
        self._line_is_delayed = False  # until the validation has ended

    def disable(self) -> None:
        """Hide the bar (ranks other than 0)."""
        self._enabled = False

    def enable(self) -> None:
        """Show the bar."""
        self._enabled = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the bar."""
        self._start_time = time.perf_counter()
        self._start_step = trainer.global_step
        self._clock.start(trainer)
        n_steps = self._clock.last or 1000
        self._clock.every = math.ceil(n_steps / self.lines)
        console = Console(file=self.stream or sys.stdout)
        if self._enabled and console.is_terminal:
            self._open_bar(console, trainer, pl_module)

    def _open_bar(self, console: Console, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        name = type(pl_module).__name__
        settings = settings_of(pl_module)
        if settings is not None:
            name = settings.label
        self._bar = Progress(
            TextColumn(f"[bold]{escape(name)}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )
        self._task = self._bar.add_task(
            "fit", total=self._clock.last, completed=trainer.global_step, text=""
        )
        self._bar.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update the bar, or print a line."""
        if not self._enabled or not self._clock.ended(trainer):
            return
        step = trainer.global_step
        is_due = self._clock.is_due(step) or self._line_is_delayed
        if is_due:
            report_progress(step, self._clock.last)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=_text(trainer))
        elif is_due:
            self._print_or_delay_line(trainer)

    def _print_or_delay_line(self, trainer: L.Trainer) -> None:
        """Print a line now, or after the validation that follows, to show its loss."""
        self._line_is_delayed = validates_now(trainer)
        if not self._line_is_delayed:
            self._print_line(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show the validation loss."""
        if self._bar is not None:
            self._bar.update(self._task, text=_text(trainer))
        self._print_delayed_line(trainer)

    def _print_delayed_line(self, trainer: L.Trainer) -> None:
        if self._line_is_delayed:
            self._line_is_delayed = False
            self._print_line(trainer)

    def _print_line(self, trainer: L.Trainer) -> None:
        """Print a line for logs."""
        step = trainer.global_step
        last = self._clock.last
        total = "" if last is None else f"/{last}"
        parts = [f"step {step}{total}"]
        data = data_of(trainer)
        if data is not None:
            parts.append(f"tokens {step * data.tokens_per_step:,}")
        parts.append(_text(trainer))
        if last is not None:
            parts.append(f"left {self._time_left(step, last)}")
        print("  ".join(parts), file=self.stream or sys.stdout, flush=True)

    def _time_left(self, step: int, last: int) -> str:
        """Return minutes:seconds until the last step, at the mean speed of this process."""
        elapsed = time.perf_counter() - self._start_time
        seconds_per_step = elapsed / max(1, step - self._start_step)
        minutes, seconds = divmod(int(seconds_per_step * (last - step)), 60)
        return f"{minutes}:{seconds:02d}"

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Close the bar, or print the line that waits for a validation which did not follow."""
        self._print_delayed_line(trainer)
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Close the bar, so that the error message is readable."""
        self.on_train_end(trainer, pl_module)


def _text(trainer: L.Trainer) -> str:
    """Return the last written values of the `TrainingMonitor`, if the run has one."""
    monitors = callbacks_of(trainer, TrainingMonitor)
    if not monitors:
        return ""
    monitor = monitors[0]
    values = {
        "loss {:.3f}": monitor.last_loss,
        "val {:.3f}": monitor.val_loss,
        "lr {:.1e}": monitor.lr,
        "{:,.0f} tok/s": monitor.throughput.tokens_per_s,
    }
    parts = [text.format(value) for text, value in values.items() if value is not None]
    return "  ".join(parts)
