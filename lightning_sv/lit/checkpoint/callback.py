"""Atomic checkpoints, written next to their place and renamed; and the state that Lightning does not save."""

import logging
import math
import os
import random
import shlex
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint, Timer
from tensorboard.compat.proto.event_pb2 import SessionLog
from torch import distributed

from lightning_sv.atomic import atomic_path, partial_of, remove, replace
from lightning_sv.callbacks.run_state import StepTrigger, tokens_seen, validates_now
from lightning_sv.errors import expect
from lightning_sv.lit.distributed import StopSignals
from lightning_sv.lit.fsdp import FullyShardedStrategy
from lightning_sv.lit.logger import RunLogger
from lightning_sv.runs.directory import CONFIG
from lightning_sv.runs.job import program
from lightning_sv.runs.sharded_checkpoint import is_sharded, read_sharded
from lightning_sv.runs.trust import allow_words, modules_of

log = logging.getLogger(__name__)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write Lightning's checkpoint files atomically: a full disk, a kill or a Ctrl-C leaves the previous one."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write `checkpoint` to `path`; after an OSError, the file at `path`, if any, is as before."""
        final = Path(path)
        final.parent.mkdir(parents=True, exist_ok=True)
        try:
            with atomic_path(final) as partial, partial.open("wb") as file:
                torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:
            # torch's zip writer fails at its end too, after a failed write
            cause = error if isinstance(error, OSError) else error.__context__
            if isinstance(cause, OSError):
                why = f"could not write {final} ({cause.strerror}); its previous content is unchanged"
                raise OSError(cause.errno, why) from error
            raise

    def load_checkpoint(self, path: Any, *given: Any, **more: Any) -> dict[str, Any]:
        """Read a checkpoint; several ranks map the file, so that a node has it in memory once."""
        if is_sharded(path):
            return read_sharded(path, tensors=True, checksums=False)
        if not distributed.is_initialized():
            return super().load_checkpoint(path, *given, **more)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def name_also(checkpoint: Path, name: Path) -> None:
    """Give a checkpoint a second name atomically: a hard link to a file, a symbolic link to a folder, or a copy."""
    name.parent.mkdir(parents=True, exist_ok=True)
    if checkpoint.is_dir():
        remove(partial_of(name))
        try:
            partial_of(name).symlink_to(os.path.relpath(checkpoint.resolve(), name.parent.resolve()))
        except OSError:  # mounted buckets and CIFS have no links
            shutil.copytree(checkpoint, partial_of(name))
        replace(partial_of(name), name)  # the old one is a folder in a copied run
        return
    with atomic_path(name) as partial:
        try:
            os.link(checkpoint, partial)
        except OSError:
            shutil.copyfile(checkpoint, partial)


def restart_between_steps(checkpoint: dict[str, Any], then: int, now: int) -> None:
    """Convert Lightning's counts of micro-batches in place, if a step had `then` of them and has `now`."""
    if then == now:
        return
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        open_batches = counts["ready"] - counts["completed"]
        wanted = f"{then}, as in the checkpoint, which was saved after a step of fewer batches."
        expect(counts["ready"] % then == 0, "trainer.accumulate_grad_batches", now, wanted)
        for name in ("ready", "started", "processed"):
            counts[name] = counts[name] // then * now
        counts["completed"] = counts["ready"] - open_batches


def rng_states(device: torch.device) -> list[dict[str, Any]]:
    """Return the states of torch, Python, NumPy and a CUDA `device` of every rank; a collective."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    here = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
    }
    if device.type == "cuda":
        here["cuda"] = torch.cuda.get_rng_state(device)
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return [here]
    states: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(states, here)
    return states


def restore_rng(states: list[dict[str, Any]], rank: int, device: torch.device) -> None:
    """Set the generators of this rank; a rank without a saved state keeps its own."""
    if rank >= len(states):
        return
    state = states[rank]
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


class LastCheckpoint(Checkpoint):
    """Keep <run_dir>/checkpoints/last.ckpt of the latest n-th and the last step, and step-500.ckpt etc. if requested.

    A numbered checkpoint is a link to an earlier last.ckpt. A run resumes from any of them. Ctrl-C, SIGTERM,
    SIGHUP, SIGUSR1, SIGUSR2 and SIGXCPU end the run after the current step, with a checkpoint.

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
        self._wait = False
        self._stop = self._stopping = False
        self._saved: int | None = None  # step of the latest checkpoint
        self._written: Path | None = None  # sharded checkpoint of `_save` that is not yet the last one
        self._resumed: int | None = None  # step at which this start began, until it writes its first checkpoint

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start to count after the checkpoint that the run is resumed from."""
        self._clock.start(trainer)
        if self.path is not None and trainer.is_global_zero:
            for partial in self.path.parent.glob(partial_of(self.path.with_name("*.ckpt")).name):
                remove(partial)  # left by a process that was killed while writing
        self._resumed = self._saved = trainer.global_step
        for logger in trainer.loggers:
            if isinstance(logger, RunLogger):
                logger.mark(SessionLog.START, tokens_seen(trainer) + 1)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        """Request a stop; the devices agree on it in `NonFinite.check`, or after the step if nothing calls that."""
        pl_module.stop_asked, pl_module.stop_agreed = self.signals.received is not None, False

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Write after a step that is due, or on a request to stop."""
        self._finish_write(trainer, wait=False)
        self._stopping |= trainer.should_stop  # by max_time or a callback
        trainer.should_stop = False  # inside a step: the run ends after it
        if not self._clock.ended(trainer):
            return
        # Lightning then validates at the last step too
        trainer.should_stop = self._stopping or self._clock.is_last(self._clock.step)
        self._stop = self.signals.received is not None
        if trainer.world_size > 1:
            if not pl_module.stop_agreed:  # own clipping, or manual optimization
                pl_module.stop_asked = trainer.strategy.reduce_boolean_decision(self._stop, all=False)
            self._stop = pl_module.stop_asked
        ends = trainer.should_stop and trainer.fit_loop._can_stop_early  # min_steps may forbid it
        if self._stop or ends or self._clock.is_due(self._clock.step):
            # Wait for this step's validation, which a resumed run would not repeat; Lightning validates before a stop.
            self._wait = validates_now(trainer) or (ends and not self._stop)
            if not self._wait:
                self._save(trainer)

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
        found = {int(file.stem[5:]): file for file in self.path.parent.glob("step-*.ckpt") if file.stem[5:].isdigit()}
        limit = math.inf if resumed is None else resumed
        current = sorted(number for number in found if number <= limit or (numbered and number == step))
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
            if any(type(callback) is Timer for callback in trainer.callbacks):  # type: ignore[attr-defined]
                allow += ["--trainer.max_time", "null"]  # whose time includes earlier starts
            resume = shlex.join([program(), "fit", "--config", str(config), "--ckpt_path", str(self.path), *allow])
            hint = f"resume with: {resume}" if self.path.exists() else "no checkpoint was written yet"
            log.warning("stopped at step %d; %s", trainer.global_step, hint)
