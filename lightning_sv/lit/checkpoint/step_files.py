"""Files step-N.ckpt next to last.ckpt: kept checkpoints under the numbers of their steps."""

from collections.abc import Iterable
from pathlib import Path

from lightning_sv.atomic import partial_of, remove
from lightning_sv.lit.checkpoint.atomic_io import name_also


class StepFiles:
    """Name the checkpoints of a run by their steps, and remove outdated ones.

    A sharded checkpoint is written under its step, and last.ckpt links to it. A file is written as
    last.ckpt; beyond one kept checkpoint, it is linked under its step.

    Args:
        last: path of last.ckpt
        keep: number of latest checkpoints to keep
    """

    def __init__(self, last: Path, keep: int):
        self.last = last
        self.keep = keep

    def path(self, step: int) -> Path:
        """Return the path of a step's checkpoint."""
        return self.last.with_name(f"step-{step}.ckpt")

    def step_of(self, path: Path) -> int:
        """Return the step of the path of a step's checkpoint."""
        return int(path.stem.removeprefix("step-"))

    def remove_partial(self) -> None:
        """Remove files of a process that was killed while writing."""
        pattern = partial_of(self.last.with_name("*.ckpt")).name
        for partial in self.last.parent.glob(pattern):
            remove(partial)

    def add(self, step: int, resumed: int | None) -> None:
        """Keep the checkpoint of a step that was written.

        Args:
            step: its step
            resumed: step at which this start of the run began, for its first checkpoint; later ones
                are of an abandoned branch and are removed. None for later checkpoints
        """
        path = self.path(step)
        if self.keep > 1 and not path.is_dir():
            name_also(self.last, path)
        is_numbered = self.keep > 1 or path.is_dir()

        if resumed is not None:
            abandoned = {number for number in self._steps() if number > resumed}
            self._remove(abandoned - {step} if is_numbered else abandoned)
        if is_numbered:
            self._remove(self._steps()[: -self.keep])

    def _steps(self) -> list[int]:
        """Return the steps of the kept checkpoints in ascending order."""
        paths = self.last.parent.glob("step-*.ckpt")
        numbers = [path.stem.removeprefix("step-") for path in paths]
        return sorted(int(number) for number in numbers if number.isdigit())

    def _remove(self, steps: Iterable[int]) -> None:
        for step in steps:
            remove(self.path(step))
