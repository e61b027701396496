"""Checkpoints that are whole or absent: written beside their place, synced, then renamed."""

import os
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import lightning as L
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint

from lightning_sv.callbacks.clock import StepClock
from lightning_sv.lit.signals import StopSignals
from lightning_sv.runs.directory import CONFIG


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files, replaced in one step.

    A full disk, a kill or a Ctrl-C while writing leaves the previous checkpoint untouched.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write `checkpoint` to `path`.

        Raises:
            OSError: the disk is full or not writable; the file at `path`, if any, is as before
        """
        final = Path(path)
        final.parent.mkdir(parents=True, exist_ok=True)
        partial = _partial(final)
        writer = None
        try:
            with partial.open("wb") as file:
                writer = _Writer(file)
                torch.save(checkpoint, cast(IO[bytes], writer))
                file.flush()
                os.fsync(file.fileno())
            partial.replace(final)
        except BaseException as error:
            partial.unlink(missing_ok=True)
            cause = writer.error if writer is not None and writer.error is not None else error
            if isinstance(cause, OSError):
                raise OSError(
                    cause.errno, f"could not write {final} ({cause.strerror}); what it held before is untouched"
                ) from error
            raise


def _partial(final: Path) -> Path:
    """Where a checkpoint is written; its own name says that it is whole."""
    return final.with_name(f".{final.name}.partial")


def restart_between_steps(checkpoint: dict[str, Any], then: int, now: int) -> None:
    """Count Lightning's micro-batches as this run does: a step may have another number of them on other devices.

    Args:
        checkpoint: written after a whole step; changed in place
        then: micro-batches of a step in the run that wrote it
        now: in this run
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        open_batches = counts["ready"] - counts["completed"]
        assert counts["ready"] % then == 0, "saved inside a step"
        for name in ("ready", "started", "processed"):
            counts[name] = counts[name] // then * now
        counts["completed"] = counts["ready"] - open_batches


class _Writer:
    """A file that remembers why a write failed: torch's zip writer loses the reason."""

    def __init__(self, file: BinaryIO):
        self.file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


class LastCheckpoint(Checkpoint):
    """Keeps one checkpoint, <run_dir>/checkpoints/last.ckpt, of the latest n-th and the last step.

    Ctrl-C, SIGTERM and SIGUSR1 end the run after the step under way, with a checkpoint of it.

    Args:
        every_n_steps: optimizer steps between two writes
    """

    def __init__(self, every_n_steps: int = 500):
        self._clock = StepClock("checkpoint.every_n_steps", every_n_steps)
        self.path: Path | None = None
        self._signals = StopSignals()
        self._started = False
        self._wait = False
        self._stop = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Listen to signals; a resumed run does not write again what it was resumed from."""
        self._clock.start(trainer)
        self._started = True
        self._signals.listen(trainer)
        if self.path is not None and trainer.is_global_zero:
            _partial(self.path).unlink(missing_ok=True)  # of a process that was killed while it wrote

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        """Let the devices agree on a stop, with all else that they exchange once a step (`NonFinite.check`)."""
        pl_module.stop_asked = self._signals.came

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Write when due, or when asked to stop; after a whole step only."""
        if not self._clock.ended(trainer):
            return
        self._stop = self._signals.came if trainer.world_size == 1 else pl_module.stop_asked
        if not self._clock.is_due(trainer, self._clock.step) and not self._stop:
            return
        if self._validates_now(trainer):
            self._wait = True  # for this step's validation: a resumed run would not repeat it
        else:
            self._save(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write what waited for the validation."""
        if self._wait:
            self._wait = False
            self._save(trainer)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Give the signals back."""
        self._signals.leave()

    @staticmethod
    def _validates_now(trainer: L.Trainer) -> bool:
        every = int(trainer.val_check_interval)  # type: ignore[attr-defined]
        batches = trainer.global_step * trainer.accumulate_grad_batches
        return trainer.global_step >= trainer.max_steps or batches % every == 0

    def _save(self, trainer: L.Trainer) -> None:
        assert self.path is not None, "the command line sets the path"
        for logger in trainer.loggers:
            logger.save()  # a resumed run does not write again what it logged up to here
        trainer.save_checkpoint(self.path)
        if self._stop and self._clock.step < trainer.max_steps:
            self._signals.stop(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Say how to go on after a signal or a failure; nothing where the run was refused before its first step."""
        if self._started and trainer.is_global_zero and self.path is not None:
            resume = f"--config {self.path.parent.parent / CONFIG} --ckpt_path {self.path}"
            hint = f"resume with: lightning-sv fit {resume}" if self.path.exists() else "no checkpoint was written yet"
            print(f"stopped at step {trainer.global_step}; {hint}", flush=True)
