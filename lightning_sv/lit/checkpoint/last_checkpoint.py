"""The checkpoint from which a run resumes."""

import logging
import shlex
from pathlib import Path
from typing import Any, TypeGuard

import lightning as L
from lightning.pytorch.callbacks import Checkpoint, Timer
from lightning.pytorch.strategies import Strategy

from lightning_sv.atomic import partial_of, remove
from lightning_sv.callbacks.run_state import callbacks_of, tokens_seen
from lightning_sv.callbacks.steps import StepTrigger, validates_now
from lightning_sv.errors import ConfigError
from lightning_sv.lit.checkpoint.sharded_write import link_last
from lightning_sv.lit.checkpoint.shared_folder import check_shared_folder
from lightning_sv.lit.fsdp import FullyShardedStrategy
from lightning_sv.lit.guards.finite import FiniteGuard
from lightning_sv.lit.logger import RunLogger
from lightning_sv.lit.signals import StopSignals, any_rank
from lightning_sv.runs.directory import CONFIG
from lightning_sv.runs.job import program

log = logging.getLogger(__name__)


class LastCheckpoint(Checkpoint):
    """Keep <run_dir>/checkpoints/last.ckpt of the latest n-th and the last step.

    A run resumes from it. A sharded checkpoint is a folder last-step-500.ckpt, to which last.ckpt
    links. Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 end the run after the current step, with a
    checkpoint.

    Args:
        every_n_steps: optimizer steps between two writes

    Raises:
        ConfigError: when training starts, no path is set
    """

    def __init__(self, every_n_steps: int = 500):
        self._clock = StepTrigger("checkpoint.every_n_steps", every_n_steps)
        # The command line sets both.
        self.path: Path | None = None  # of last.ckpt
        self.program = [program()]  # that resumes the run
        self.signals = StopSignals()
        self._guard: FiniteGuard | None = None
        self._waits_for_validation = False
        self._is_asked_to_stop = False
        self._ends_after_step = False
        self._saved_step: int | None = None  # from the start of training on

    @property
    def last(self) -> Path:
        """Path of last.ckpt, once training has started."""
        assert self.path is not None
        return self.path

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start to count after the checkpoint that the run is resumed from."""
        if self.path is None:
            expected = (
                "ModelCheckpoint(save_last=True), because only lightning-sv fit sets its path"
            )
            raise ConfigError(f"a callback is LastCheckpoint; expected {expected}.")
        self._clock.start(trainer)
        self._saved_step = trainer.global_step
        if trainer.is_global_zero:
            _remove_partial(self.path.parent)
        if _writes_shards(trainer.strategy):
            check_shared_folder(trainer.strategy, self.path.parent)
        for guard in callbacks_of(trainer, FiniteGuard):
            self._guard = guard
            guard.agree_on_stop(self.signals.is_received)
        for logger in _run_loggers(trainer):
            logger.mark_start(tokens_seen(trainer) + 1)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write after a step that is due, that ends the run, or in which a signal came.

        If a validation follows, `on_validation_end` writes, because a resumed run would not repeat
        it.
        """
        self._delay_stop(trainer)
        if not self._clock.ended(trainer):
            return
        is_last = self._end_after_step(trainer)
        self._is_asked_to_stop = self._agreed_stop(trainer)
        is_due = self._clock.is_due(self._clock.step)
        if is_due or is_last or self._is_asked_to_stop:
            self._save_now_or_after_validation(trainer, is_last=is_last)

    def _save_now_or_after_validation(self, trainer: L.Trainer, *, is_last: bool) -> None:
        ends = is_last and not self._is_asked_to_stop  # Lightning validates before an end
        self._waits_for_validation = ends or validates_now(trainer)
        if not self._waits_for_validation:
            self._save(trainer)

    def _delay_stop(self, trainer: L.Trainer) -> None:
        """Delay a stop by max_time or a callback, which may come inside a step, to its end."""
        self._ends_after_step |= trainer.should_stop
        trainer.should_stop = False

    def _end_after_step(self, trainer: L.Trainer) -> bool:
        """Ask Lightning to end the run if it ends with this step; return True if it will."""
        is_last = self._clock.is_at_end()
        # At the last step too, so that Lightning validates.
        trainer.should_stop = self._ends_after_step or is_last
        return trainer.should_stop

    def _agreed_stop(self, trainer: L.Trainer) -> bool:
        """Return True if a device was asked to stop, the same on all of them."""
        here = self.signals.is_received()
        if trainer.world_size == 1:
            return here
        if self._guard is not None and self._guard.stops is not None:
            return self._guard.stops
        return any_rank(trainer, here)  # a subclass of the module has left out its guards

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the checkpoint that waited for the validation, or if EarlyStopping ends the run."""
        if trainer.state.fn == "fit" and (self._waits_for_validation or trainer.should_stop):
            self._save(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write a checkpoint of the last step; log how to resume a run that ended early."""
        is_inside_step = trainer.fit_loop.epoch_loop._should_accumulate()
        if self._saved_step != trainer.global_step and not is_inside_step:  # at the end of an epoch
            self._save(trainer)
        if trainer.global_step < trainer.max_steps:
            self._log_stop(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        """Write a checkpoint of this step, and stop the run if a signal has asked for it."""
        self._waits_for_validation = False
        self._saved_step = trainer.global_step
        for logger in trainer.loggers:
            logger.save()  # a resumed run does not log these steps again
        self._write(trainer)
        if self._is_asked_to_stop and self._clock.step < trainer.max_steps:
            self.signals.stop(trainer)

    def _write(self, trainer: L.Trainer) -> None:
        """Replace last.ckpt atomically: a collective."""
        if not _writes_shards(trainer.strategy):
            trainer.save_checkpoint(self.last)
            return
        # A ModelCheckpoint in the same folder may well write step-500.ckpt.
        folder = self.last.with_name(f"last-step-{trainer.global_step}.ckpt")
        trainer.save_checkpoint(folder)
        if trainer.is_global_zero:
            link_last(self.last, folder)

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Log how to resume after a signal or a failure, if the run has started."""
        if self._saved_step is not None:
            self._log_stop(trainer)

    def _log_stop(self, trainer: L.Trainer) -> None:
        """Log the command that resumes a run which ended early."""
        if not trainer.is_global_zero:
            return
        last = self.last
        step = trainer.global_step
        if not last.exists():
            log.warning("stopped at step %d; no checkpoint was written yet", step)
            return
        config = last.parent.parent / CONFIG
        words = ["--config", str(config), "--ckpt_path", str(last)]
        if any(type(timer) is Timer for timer in callbacks_of(trainer, Timer)):
            words += ["--trainer.max_time", "null"]  # whose time includes earlier starts
        resume = shlex.join([*self.program, "fit", *words])
        log.warning("stopped at step %d; resume with: %s", step, resume)


def _run_loggers(trainer: L.Trainer) -> list[RunLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, RunLogger)]


def _writes_shards(strategy: Strategy) -> TypeGuard[FullyShardedStrategy]:
    return isinstance(strategy, FullyShardedStrategy) and strategy.sharded_checkpoints


def _remove_partial(folder: Path) -> None:
    """Remove checkpoints of a process that was killed while writing."""
    pattern = partial_of(Path("*.ckpt")).name
    for partial in folder.glob(pattern):
        remove(partial)
