"""TensorBoard's logger of a run."""

from typing import Any

from lightning.fabric.loggers.logger import _DummyExperiment
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.compat.proto.event_pb2 import Event, SessionLog


class RunLogger(TensorBoardLogger):
    """TensorBoard's logger, silent until `opened`: a run that is refused while it is set up leaves no event file."""

    opened = False

    @property
    def experiment(self) -> Any:
        """The writer; Lightning asks for it before the checkpoint is read."""
        return super().experiment if self.opened else _DummyExperiment()

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
            super().save()
