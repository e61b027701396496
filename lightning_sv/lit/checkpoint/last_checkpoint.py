"""The checkpoint from which a run resumes."""

import logging
import math
import shlex
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint, Timer
from tensorboard.compat.proto.event_pb2 import SessionLog

from lightning_sv.atomic import partial_of, remove
from lightning_sv.callbacks.run_state import StepTrigger, tokens_seen, validates_now
from lightning_sv.errors import expect
from lightning_sv.lit.checkpoint.atomic_io import name_also
from lightning_sv.lit.fsdp import FullyShardedStrategy
from lightning_sv.lit.guards.finite import FiniteGuard
from lightning_sv.lit.logger import RunLogger
from lightning_sv.lit.signals import StopSignals
from lightning_sv.runs.directory import CONFIG
from lightning_sv.runs.job import program
from lightning_sv.runs.trust import allow_words, modules_of

log = logging.getLogger(__name__)


class LastCheckpoint(Checkpoint):
    """Keep <run_dir>/checkpoints/last.ckpt of the latest n-th and the last step, and step-500.ckpt etc. if requested.

    A numbered checkpoint is a link to an earlier last.ckpt. A run resumes from any of them. Ctrl-C,
    SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 and SIGXCPU end the run after the current step, with a
    checkpoint.

    Args:
        every_n_steps: optimizer steps between two writes
        keep: number of latest checkpoints to keep; beyond 1 under their steps

    Raises:
        ConfigError: keep is below 1
    """

    def __init__(self, every_n_steps: int = 500, keep: int = 1):
        expect(keep >= 1, "checkpoint.keep", keep, "at least 1.")
        self._clock = StepTrigger("checkpoint.every_n_steps", every_n_steps)
        self.keep = keep
        self.path: Path | None = None
        self.signals = StopSignals()
        self._guard: FiniteGuard | None = None
        self._wait = False
        self._stop = self._stopping = False
        self._saved: int | None = None  # step of the latest checkpoint
        self._written: Path | None = (
            None  # sharded checkpoint of `_save` that is not yet the last one
        )
        self._resumed: int | None = (
            None  # step at which this start began, until it writes its first checkpoint
        )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start to count after the checkpoint that the run is resumed from."""
        self._clock.start(trainer)
        if self.path is not None and trainer.is_global_zero:
            for partial in self.path.parent.glob(partial_of(self.path.with_name("*.ckpt")).name):
                remove(partial)  # left by a process that was killed while writing
        self._resumed = self._saved = trainer.global_step
        self._guard = next(
            (each for each in _callbacks(trainer) if isinstance(each, FiniteGuard)), None
        )
        if self._guard is not None:
            self._guard.agree_on_stop(self.signals.is_received)
        for logger in trainer.loggers:
            if isinstance(logger, RunLogger):
                logger.mark(SessionLog.START, tokens_seen(trainer) + 1)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write after a step that is due, or on a request to stop."""
        self._finish_write(trainer, wait=False)
        self._stopping |= trainer.should_stop  # by max_time or a callback
        trainer.should_stop = False  # inside a step: the run ends after it
        if not self._clock.ended(trainer):
            return
        # Lightning then validates at the last step too
        trainer.should_stop = self._stopping or self._clock.is_last(self._clock.step)
        self._stop = self._agreed_stop(trainer)
        ends = trainer.should_stop and trainer.fit_loop._can_stop_early  # min_steps may forbid it
        if self._stop or ends or self._clock.is_due(self._clock.step):
            # Wait for this step's validation, which a resumed run would not repeat; Lightning
            # validates before a stop.
            self._wait = validates_now(trainer) or (ends and not self._stop)
            if not self._wait:
                self._save(trainer)

    def _agreed_stop(self, trainer: L.Trainer) -> bool:
        """Return True if a device was asked to stop, the same on all of them."""
        if trainer.world_size == 1:
            return self.signals.is_received()
        if self._guard is not None and self._guard.stops is not None:
            return self._guard.stops
        # a subclass of the module has left out its guards
        return bool(trainer.strategy.reduce_boolean_decision(self.signals.is_received(), all=False))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the checkpoint that waited for the validation, or if EarlyStopping ends the run."""
        if trainer.state.fn == "fit" and (self._wait or trainer.should_stop):
            self._save(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Wait for a checkpoint that is being written; log how to resume a run that max_time or a callback ended."""
        inside_step = trainer.fit_loop.epoch_loop._should_accumulate()
        if self._saved != trainer.global_step and not inside_step:  # ended at the end of an epoch
            self._save(trainer)
        self._finish_write(trainer)
        if trainer.global_step < trainer.max_steps:
            self._log_stop(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        assert self.path is not None, "the command line sets the path"
        self._wait, self._saved = False, trainer.global_step
        for logger in trainer.loggers:
            if isinstance(logger, RunLogger):
                logger.mark(SessionLog.CHECKPOINT, tokens_seen(trainer))
            logger.save()  # a resumed run does not log these steps again
        strategy = trainer.strategy
        if isinstance(strategy, FullyShardedStrategy) and strategy.sharded_checkpoints:
            self._finish_write(trainer)
            trainer.save_checkpoint(self.path.with_name(f"step-{trainer.global_step}.ckpt"))
            self._written = strategy.writing
            if self._stop:
                self._finish_write(trainer)
        else:
            trainer.save_checkpoint(self.path)
            if trainer.is_global_zero:
                self._remove_outdated(trainer.global_step)
        if self._stop and self._clock.step < trainer.max_steps:
            self.signals.stop(trainer)

    def _finish_write(self, trainer: L.Trainer, *, wait: bool = True) -> None:
        """Make a sharded checkpoint of `_save` the last one, once all ranks have written; remove outdated ones."""
        path, strategy = self._written, trainer.strategy
        if path is None or not isinstance(strategy, FullyShardedStrategy):
            return
        strategy.finish_write(wait=wait)
        if strategy.writing == path:
            return
        self._written = None
        if trainer.is_global_zero:
            assert self.path is not None
            name_also(path, self.path)  # before the previous one is removed
            self._remove_outdated(int(path.stem[5:]))

    def _remove_outdated(self, step: int) -> None:
        """Keep last.ckpt under its step too; remove numbered checkpoints of an abandoned branch or beyond `keep`."""
        assert self.path is not None
        name, resumed, self._resumed = self.path.with_name(f"step-{step}.ckpt"), self._resumed, None
        if self.keep > 1 and not name.is_dir():
            name_also(self.path, name)
        numbered = self.keep > 1 or name.is_dir()
        found = {
            int(file.stem[5:]): file
            for file in self.path.parent.glob("step-*.ckpt")
            if file.stem[5:].isdigit()
        }
        limit = math.inf if resumed is None else resumed
        current = sorted(
            number for number in found if number <= limit or (numbered and number == step)
        )
        for number in found.keys() - set(current[-self.keep :] if numbered else current):
            remove(found[number])

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Log how to resume after a signal or a failure, if the run has started."""
        if self._saved is not None:
            self._log_stop(trainer)

    def _log_stop(self, trainer: L.Trainer) -> None:
        if trainer.is_global_zero and self.path is not None:
            config = self.path.parent.parent / CONFIG
            allow = allow_words(modules_of(config))
            if any(type(callback) is Timer for callback in _callbacks(trainer)):
                allow += ["--trainer.max_time", "null"]  # whose time includes earlier starts
            resume = shlex.join(
                [program(), "fit", "--config", str(config), "--ckpt_path", str(self.path), *allow]
            )
            hint = (
                f"resume with: {resume}" if self.path.exists() else "no checkpoint was written yet"
            )
            log.warning("stopped at step %d; %s", trainer.global_step, hint)


def _callbacks(trainer: L.Trainer) -> list[L.Callback]:
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks
