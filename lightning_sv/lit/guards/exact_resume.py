"""Exact resume: what a checkpoint needs in addition to what Lightning saves."""

import logging
from dataclasses import asdict
from math import isclose
from typing import Any

import lightning as L
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lightning_sv.callbacks.run_state import data_of
from lightning_sv.errors import ConfigError
from lightning_sv.lit.checkpoint.compat import check_recorded, record_settings
from lightning_sv.lit.checkpoint.random_states import restore_rng, rng_states
from lightning_sv.runs.checkpoint import CHECKPOINT_KEY, RNG_KEY
from lightning_sv.runs.provenance import commit
from lightning_sv.runs.segments import Segments

log = logging.getLogger(__name__)


class ExactResume(L.Callback):
    """Store random states, accumulation and provenance in checkpoints, and continue exactly.

    A resumed run restores:

    ==================================  ========================  ================================
    part                                saved and restored by     entry of the checkpoint
    ==================================  ========================  ================================
    weights, biases of experts          Lightning, or             state_dict
                                        `FullyShardedStrategy`
    optimizer                           the same                  optimizer_states
    schedule, counts of batches         Lightning                 lr_schedulers, loops
    callbacks                           each callback             callbacks
    position in the corpus              `TokenDataModule`         TokenDataModule
    random generators of all ranks      `ExactResume`             rng_states
    segments, origin                    `ExactResume`             lightning_sv
    ==================================  ========================  ================================

    Not restored but compared: the settings, which `lit.checkpoint.compat` records in the entry
    lightning_sv. The module's own hooks do so too, for checkpoints of weights and for
    `load_from_checkpoint`, but a subclass may replace them. Counts of batches are converted to the
    accumulation of the resuming run, and the rates follow its schedule.

    Attributes:
        segments: starts of the program that the run consists of
        origin: origin of the initial weights, see `lit.init_from.Start`; None if they were
            initialized
    """

    def __init__(self) -> None:
        self.segments = Segments()
        self.origin: dict[str, Any] | None = None
        self._rng: list[dict[str, Any]] | None = None  # of the checkpoint, until training starts

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Start a segment of a fit, and save the configs of a subclass as plain values too.

        Loggers and weights_only=True need plain values.
        """
        pl_module.save_hyperparameters(asdict(pl_module.settings))
        if stage == "fit":
            self.segments = Segments()
            self.origin = pl_module.origin
            self._rng = None

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        """Store the progress and the settings."""
        data = data_of(trainer)
        corpus_hash = None if data is None else data.manifest.corpus_hash
        checkpoint[CHECKPOINT_KEY] = {
            "accumulate": trainer.accumulate_grad_batches,
            "legs": self.segments_so_far(trainer, pl_module),
            "commit": commit(),
            "corpus_hash": corpus_hash,
            "origin": self.origin,
        }
        record_settings(checkpoint, pl_module)
        checkpoint[RNG_KEY] = rng_states(pl_module.device)

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        """Continue after the saved step, also on a different number of devices.

        Raises:
            ConfigError: the settings are not those of the checkpoint
        """
        if trainer.state.fn != "fit":
            return
        check_recorded(checkpoint, pl_module)
        saved = checkpoint[CHECKPOINT_KEY]
        self._rng = checkpoint[RNG_KEY]
        self.origin = saved.get("origin")
        self.segments.restore(saved.get("legs"))
        fit_loop = checkpoint["loops"]["fit_loop"]
        restart_between_steps(fit_loop, saved["accumulate"], trainer.accumulate_grad_batches)

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Restore the checkpoint's random states, and follow the schedule of this run."""
        if self._rng is None:
            return
        restore_rng(self._rng, trainer.global_rank, pl_module.device)
        self._rng = None
        _begin_next_epoch(trainer.fit_loop)
        if pl_module.own_optimizer is None:
            for each in trainer.lr_scheduler_configs:
                follow_schedule(each.scheduler)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Set the step at which `self.log` logs, which a resume by Lightning shifts.

        Its loop guesses by its counts at which hook a checkpoint was saved, because the step is
        counted after the last hook. After a fit, or after the last validation of a run, the guess
        is wrong (Lightning 2.6).
        """
        if pl_module.automatic_optimization:  # otherwise a batch may have several steps
            trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step

    def segments_so_far(self, trainer: L.Trainer, pl_module: Any) -> list[dict[str, Any]]:
        """Return the segments of the run, each with the settings that change its numbers."""
        numerics = {
            "precision": str(trainer.precision),
            "device": trainer.strategy.root_device.type,
        }
        data = data_of(trainer)
        if data is not None and pl_module.settings.backbone.n_expert:
            # The balance loss of experts depends on the micro-batch.
            numerics["micro_batch"] = str(data.share(trainer.world_size).micro_batch)
        return self.segments.at(trainer.global_step, trainer.max_steps, numerics)


def follow_schedule(scheduler: LRScheduler) -> None:
    """Set the rates of the next step, and warn if they are not those of the checkpoint.

    Those of the checkpoint are of its own schedule, whose number of steps may be different. That
    changes every rate of a cosine; wsd does not change before its decay.
    """
    if not isinstance(scheduler, LambdaLR):
        return
    groups = scheduler.optimizer.param_groups
    then = groups[0]["lr"]
    for group, peak, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["lr"] = peak * factor(scheduler.last_epoch)
    now = groups[0]["lr"]
    if not isclose(then, now, rel_tol=1e-6):
        log.warning(
            "the learning rate is %.3g instead of %.3g from step %d on, because the schedule has a "
            "different number of steps than that of the checkpoint",
            now,
            then,
            scheduler.last_epoch,
        )


def restart_between_steps(fit_loop: dict[str, Any], then: int, now: int) -> None:
    """Change the counts of Lightning's loop in place, so that it continues after the last step.

    A step in which the checkpoint was saved begins again: its gradient is lost, and the weights are
    those of the step before. Micro-batches are converted from `then` per step to `now`: 12 with 3
    per step are 4 steps, which are 8 with 2 per step.

    Raises:
        ConfigError: `now` is different, and an epoch ended with a step of fewer micro-batches
    """
    batches = fit_loop["epoch_loop.batch_progress"]
    begun = 0  # micro-batches since the last step
    if _is_inside_epoch(batches):
        begun = batches["current"]["processed"] % then
        _continue_epoch(fit_loop["epoch_progress"])
    if then == now and not begun:
        return

    for counts in (batches["total"], batches["current"]):
        # A callback saves before Lightning counts the batch as completed.
        not_completed = 0 if begun else counts["processed"] - counts["completed"]
        n_batches = _converted(counts["processed"] - begun, then, now)
        for name in ("ready", "started", "processed"):
            counts[name] = n_batches
        counts["completed"] = n_batches - not_completed


def _is_inside_epoch(batches: dict[str, Any]) -> bool:
    """Return True if batches of the epoch follow those that were trained."""
    current = batches["current"]
    is_last = batches["is_last_batch"] and current["processed"] == current["ready"]
    return current["ready"] > 0 and not is_last


def _continue_epoch(epochs: dict[str, Any]) -> None:
    """Count an epoch that a stop has ended as not read; Lightning counts it as read."""
    for counts in (epochs["total"], epochs["current"]):
        counts["processed"] = counts["completed"] = counts["started"] - 1


def _begin_next_epoch(fit_loop: Any) -> None:
    """Count the epoch that follows a checkpoint of an epoch's last batch.

    Lightning counts the epoch before as read, and does not count this one as begun. Then no later
    checkpoint of the run could tell a read epoch from a stopped one.
    """
    epochs = fit_loop.epoch_progress
    is_read = epochs.total.processed == epochs.total.started
    if fit_loop.restarted_mid_epoch and is_read and not fit_loop.done:
        epochs.increment_ready()
        epochs.increment_started()


def _converted(n_batches: int, then: int, now: int) -> int:
    """Return the number of micro-batches in the same steps, with `now` per step instead of `then`.

    Raises:
        ConfigError: one of the steps had fewer
    """
    if then == now:
        return n_batches
    if n_batches % then:
        expected = f"{then}, as in the checkpoint"
        hint = "It was saved after a step of fewer batches."
        raise ConfigError(f"trainer.accumulate_grad_batches is {now}; expected {expected}. {hint}")
    return n_batches // then * now
