"""TensorBoard's logger of a run."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import _DummyExperiment
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

from lightning_sv.runs.tags import VAL_LOSS


class RunLogger(TensorBoardLogger):
    """TensorBoard logger with training tokens as the axis.

    It writes nothing until `opened`, so that a run rejected during setup leaves no event file.
    """

    opened = False
    tokens_per_step = 1  # set by the command line

    @property
    def log_dir(self) -> str:
        """The run directory; Lightning's property would expand `~` and `$NAME` in it again."""
        return str(Path(self.save_dir, str(self.version)))

    @property
    def experiment(self) -> Any:
        """The writer; Lightning requests it before the checkpoint is loaded."""
        if not self.opened:
            return _DummyExperiment()
        _silence_writer_threads()
        return super().experiment

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Write scalars at the token count of `step` optimizer steps."""
        if step is not None:
            step *= self.tokens_per_step
        with self._errors():
            super().log_metrics(metrics, step)

    def log_hyperparams(self, params: Any, metrics: Any = None, step: int | None = None) -> None:
        """Show `params` in the table of runs, with the last validation loss of each.

        Lightning's method would write the metric as an additional scalar at step 0. For a resumed
        run, TensorBoard shows the values written first.
        """
        from torch.utils.tensorboard.summary import hparams  # takes a second to import

        self.hparams.update(params)
        for summary in hparams(params, {VAL_LOSS: 0.0}):  # only the metric's name is used
            self.experiment._get_file_writer().add_summary(summary)

    def mark_start(self, tokens: int) -> None:
        """Mark the first token of a segment, from which TensorBoard drops earlier events."""
        if self.opened:
            start = Event(session_log=SessionLog(status=SessionLog.START))
            self.experiment._get_file_writer().add_event(start, tokens)

    def save(self) -> None:
        """Flush pending events."""
        if self.opened:
            with self._errors():
                super().save()

    def finalize(self, status: str) -> None:
        """Flush and close; ignore write errors of a failed run."""
        try:
            with self._errors():
                super().finalize(status)
        except OSError:
            if status == "success":
                raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Add the directory to write errors, which Lightning hides in a ValueError."""
        try:
            yield
        except (OSError, ValueError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            if not isinstance(cause, OSError):
                raise
            raise OSError(
                cause.errno, f"could not write events in {self.log_dir} ({cause.strerror})"
            ) from error


@cache
def _silence_writer_threads() -> None:
    """Silence the exception hook for TensorBoard's threads; the next call raises their errors."""
    from tensorboard.summary.writer.event_file_writer import _AsyncWriterThread

    default_hook = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if not isinstance(args.thread, _AsyncWriterThread):
            default_hook(args)

    threading.excepthook = hook
