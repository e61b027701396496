"""Checkpoints that a run keeps: last.ckpt, and the latest ones as step-N.ckpt."""

import os
import shutil
from pathlib import Path

import lightning as L

from lightning_sv.atomic import atomic_path, partial_of, remove, replace
from lightning_sv.lit.fsdp import FullyShardedStrategy


class KeptCheckpoints:
    """Write the checkpoints of one start of a run, and remove outdated ones.

    A file is written as last.ckpt; with `keep` above 1 it is also linked as step-N.ckpt. A sharded
    checkpoint is written as step-N.ckpt, and then last.ckpt links to it.

    Args:
        last: path of last.ckpt
        keep: number of latest checkpoints to keep
        first_step: step at which this start begins; its first checkpoint replaces later ones, which
            an abandoned start has written
    """

    def __init__(self, last: Path, keep: int, first_step: int):
        self.last = last
        self.keep = keep
        self._first_step: int | None = first_step  # until the first checkpoint

    def remove_partial(self) -> None:
        """Remove files of a process that was killed while writing."""
        pattern = partial_of(self.last.with_name("*.ckpt")).name
        for partial in self.last.parent.glob(pattern):
            remove(partial)

    def save(self, trainer: L.Trainer) -> None:
        """Write a checkpoint of the current step: a collective."""
        strategy = trainer.strategy
        step = trainer.global_step
        is_sharded = isinstance(strategy, FullyShardedStrategy) and strategy.sharded_checkpoints
        path = self._path(step) if is_sharded else self.last
        trainer.save_checkpoint(path)
        if not trainer.is_global_zero:
            return
        if is_sharded:
            name_also(path, self.last)  # before the previous one is removed
        self._keep(step)

    def _keep(self, step: int) -> None:
        """Give the checkpoint of a step its number, if it has one, and remove outdated ones."""
        path = self._path(step)
        is_folder = path.is_dir()
        if self._first_step is not None:
            self._remove_after(self._first_step, written=path if is_folder else self.last)
            self._first_step = None
        if is_folder or self.keep > 1:
            if not is_folder:
                name_also(self.last, path)
            for outdated in self._steps()[: -self.keep]:
                remove(self._path(outdated))

    def _remove_after(self, first_step: int, written: Path) -> None:
        """Remove the checkpoints after a step, except the one that was just written."""
        for step in self._steps():
            path = self._path(step)
            if step > first_step and path != written:
                remove(path)

    def _path(self, step: int) -> Path:
        return self.last.with_name(f"step-{step}.ckpt")

    def _steps(self) -> list[int]:
        """Return the steps of the numbered checkpoints in ascending order."""
        paths = self.last.parent.glob("step-*.ckpt")
        numbers = [path.stem.removeprefix("step-") for path in paths]
        return sorted(int(number) for number in numbers if number.isdigit())


def name_also(checkpoint: Path, name: Path) -> None:
    """Give a checkpoint a second name atomically: a link, or a copy if there are none."""
    name.parent.mkdir(parents=True, exist_ok=True)
    if checkpoint.is_dir():
        _name_folder(checkpoint, name)
        return
    with atomic_path(name) as partial:
        try:
            os.link(checkpoint, partial)
        except OSError:
            shutil.copyfile(checkpoint, partial)


def _name_folder(checkpoint: Path, name: Path) -> None:
    partial = partial_of(name)
    remove(partial)
    target = os.path.relpath(checkpoint.resolve(), name.parent.resolve())
    try:
        partial.symlink_to(target)
    except OSError:  # mounted buckets and CIFS have no links
        shutil.copytree(checkpoint, partial)
    replace(partial, name)  # the old one is a folder in a copied run
