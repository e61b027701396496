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


class RunLogger(TensorBoardLogger):
    """TensorBoard's logger, with training tokens as the axis.

    It is silent until `opened`: a run that is refused while it is set up leaves no event file.
    """

    opened = False
    #: tokens per optimizer step; the command line sets it
    tokens_per_step = 1

    @property
    def log_dir(self) -> str:
        """The run directory; Lightning's own would expand `~` and `$NAME` in it once more."""
        return str(Path(self.save_dir, str(self.version)))

    @property
    def experiment(self) -> Any:
        """The writer; Lightning asks for it before the checkpoint is read."""
        if not self.opened:
            return _DummyExperiment()
        _silence_writer_threads()
        return super().experiment

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Write scalars at the tokens of `step` optimizer steps.

        Raises:
            OSError: the directory cannot be written any more
        """
        with self._errors():
            super().log_metrics(metrics, None if step is None else step * self.tokens_per_step)

    def log_hyperparams(self, params: Any, metrics: Any = None, step: int | None = None) -> None:
        """Show `params` in the table of runs, beside the last validation loss of each, also while it trains.

        Lightning's own would write the metric as one more scalar, at step 0. Of a run that was resumed, TensorBoard
        shows what was written first.
        """
        from torch.utils.tensorboard.summary import hparams  # a second to import

        self.hparams.update(params)
        for summary in hparams(params, {"val/loss": 0.0}):  # of the metric the name alone counts
            self.experiment._get_file_writer().add_summary(summary)

    def mark_start(self, tokens: int) -> None:
        """Mark where this start begins: TensorBoard and `runs.events` drop what was logged beyond it before."""
        self._mark(SessionLog.START, tokens + 1)

    def mark_checkpoint(self, tokens: int) -> None:
        """Mark that a checkpoint is about to be written: only what is marked here can be resumed."""
        self._mark(SessionLog.CHECKPOINT, tokens)

    def _mark(self, status: "SessionLog.SessionStatus", tokens: int) -> None:
        if self.opened:
            event = Event(session_log=SessionLog(status=status))
            self.experiment._get_file_writer().add_event(event, tokens)

    def save(self) -> None:
        """Write what is not yet on the disk."""
        if self.opened:
            with self._errors():
                super().save()

    def finalize(self, status: str) -> None:
        """Write what is left; of a run that fails, as far as that goes."""
        try:
            with self._errors():
                super().finalize(status)
        except OSError:
            if status == "success":
                raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Name the directory in what TensorBoard's thread met; Lightning makes a ValueError about the value of it."""
        try:
            yield
        except (OSError, ValueError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            if not isinstance(cause, OSError):
                raise
            raise OSError(cause.errno, f"could not write events in {self.log_dir} ({cause.strerror})") from error


@cache
def _silence_writer_threads() -> None:
    """Leave the errors of TensorBoard's threads to the next call, which raises them."""
    from tensorboard.summary.writer.event_file_writer import _AsyncWriterThread

    others = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if not isinstance(args.thread, _AsyncWriterThread):
            others(args)

    threading.excepthook = hook
