"""The checkpoint from which a run resumes."""

import logging
import shlex
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint, Timer
from tensorboard.compat.proto.event_pb2 import SessionLog

from lightning_sv.callbacks.run_state import (
    StepTrigger,
    callbacks_of,
    tokens_seen,
    validates_now,
)
from lightning_sv.errors import ConfigError, expect
from lightning_sv.lit.checkpoint.kept import KeptCheckpoints
from lightning_sv.lit.guards.finite import FiniteGuard
from lightning_sv.lit.logger import RunLogger
from lightning_sv.lit.signals import StopSignals, any_rank
from lightning_sv.runs.directory import CONFIG
from lightning_sv.runs.job import program
from lightning_sv.runs.trust import allow_words, modules_of

log = logging.getLogger(__name__)


class LastCheckpoint(Checkpoint):
    """Keep <run_dir>/checkpoints/last.ckpt of the latest n-th and the last step.

    With `keep`, also step-500.ckpt etc., links to an earlier last.ckpt. A run resumes from any of
    them. Ctrl-C, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 and SIGXCPU end the run after the current step,
    with a checkpoint.

    Args:
        every_n_steps: optimizer steps between two writes
        keep: number of latest checkpoints to keep; beyond 1 under their steps

    Raises:
        ConfigError: keep is below 1; or, when training starts, no path is set
    """

    def __init__(self, every_n_steps: int = 500, keep: int = 1):
        expect(keep >= 1, "checkpoint.keep", keep, "at least 1.")
        self._clock = StepTrigger("checkpoint.every_n_steps", every_n_steps)
        self.keep = keep
        self.path: Path | None = None  # the command line sets it
        self.signals = StopSignals()
        self._kept: KeptCheckpoints | None = None  # from the start of training on
        self._guard: FiniteGuard | None = None
        self._waits_for_validation = False
        self._is_asked_to_stop = False
        self._ends_after_step = False
        self._saved_step: int | None = None

    @property
    def kept(self) -> KeptCheckpoints:
        """The checkpoints of this start, once training has started."""
        assert self._kept is not None
        return self._kept

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start to count after the checkpoint that the run is resumed from."""
        if self.path is None:
            expected = (
                "ModelCheckpoint(save_last=True), because only lightning-sv fit sets its path"
            )
            raise ConfigError(f"a callback is LastCheckpoint; expected {expected}.")
        self._clock.start(trainer)
        self._saved_step = trainer.global_step
        self._kept = KeptCheckpoints(self.path, self.keep, trainer.global_step)
        if trainer.is_global_zero:
            self._kept.remove_partial()
        for guard in callbacks_of(trainer, FiniteGuard):
            self._guard = guard
            guard.agree_on_stop(self.signals.is_received)
        for logger in _run_loggers(trainer):
            logger.mark(SessionLog.START, tokens_seen(trainer) + 1)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write after a step that is due, or on a request to stop."""
        self._ends_after_step |= trainer.should_stop  # by max_time or a callback
        trainer.should_stop = False  # inside a step: the run ends after it
        if not self._clock.ended(trainer):
            return
        step = self._clock.step
        # Lightning then validates at the last step too.
        trainer.should_stop = self._ends_after_step or self._clock.is_last(step)
        ends = trainer.should_stop and trainer.fit_loop._can_stop_early  # min_steps may forbid it
        self._is_asked_to_stop = self._agreed_stop(trainer)
        is_due = ends or self._is_asked_to_stop or self._clock.is_due(step)
        if not is_due:
            return
        # A resumed run would not repeat this step's validation. Lightning validates before an end.
        validates_before_end = ends and not self._is_asked_to_stop
        self._waits_for_validation = validates_before_end or validates_now(trainer)
        if not self._waits_for_validation:
            self._save(trainer)

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
            self._log_stop(trainer, self.kept.last)

    def _save(self, trainer: L.Trainer) -> None:
        self._waits_for_validation = False
        self._saved_step = trainer.global_step
        for logger in _run_loggers(trainer):
            logger.mark(SessionLog.CHECKPOINT, tokens_seen(trainer))
        for each in trainer.loggers:
            each.save()  # a resumed run does not log these steps again
        self.kept.save(trainer)
        if self._is_asked_to_stop and self._clock.step < trainer.max_steps:
            self.signals.stop(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Log how to resume after a signal or a failure, if the run has started."""
        if self._kept is not None:
            self._log_stop(trainer, self._kept.last)

    def _log_stop(self, trainer: L.Trainer, last: Path) -> None:
        if not trainer.is_global_zero:
            return
        step = trainer.global_step
        if not last.exists():
            log.warning("stopped at step %d; no checkpoint was written yet", step)
            return
        config = last.parent.parent / CONFIG
        words = ["--config", str(config), "--ckpt_path", str(last)]
        words += allow_words(modules_of(config))
        if any(type(timer) is Timer for timer in callbacks_of(trainer, Timer)):
            words += ["--trainer.max_time", "null"]  # whose time includes earlier starts
        resume = shlex.join([program(), "fit", *words])
        log.warning("stopped at step %d; resume with: %s", step, resume)


def _run_loggers(trainer: L.Trainer) -> list[RunLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, RunLogger)]
