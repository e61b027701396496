"""TensorBoard's logger of a run."""

from typing import Any

from lightning.fabric.loggers.logger import _DummyExperiment
from lightning.pytorch.loggers import TensorBoardLogger


class RunLogger(TensorBoardLogger):
    """TensorBoard's logger, silent until `opened`: a run that is refused while it is set up leaves no event file."""

    opened = False

    @property
    def experiment(self) -> Any:
        """The writer; Lightning asks for it before the checkpoint is read."""
        return super().experiment if self.opened else _DummyExperiment()

    def save(self) -> None:
        """Write what is not yet on the disk."""
        if self.opened:
            super().save()
