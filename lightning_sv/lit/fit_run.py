"""One run of `fit`: check it, open its directory, begin, and finish it."""

import json
import logging
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from rich.console import Console

from lightning_sv.atomic import write_atomically
from lightning_sv.callbacks.run_state import callbacks_of
from lightning_sv.corpus import Tokenizer, is_remote
from lightning_sv.errors import ConfigError, expect
from lightning_sv.lit.checkpoint.last_checkpoint import LastCheckpoint
from lightning_sv.lit.checkpoint.resumed import check_not_replaced, check_resumed_settings
from lightning_sv.lit.command_run import CommandRun, several
from lightning_sv.lit.fsdp import FullyShardedStrategy
from lightning_sv.lit.init_from import read_start
from lightning_sv.lit.logger import RunLogger
from lightning_sv.lit.summary import (
    hyperparameters,
    print_groups,
    show_summary,
    summarize,
)
from lightning_sv.plan.parallel import check_compiled
from lightning_sv.runs.directory import (
    CONFIG,
    LAST,
    NONFINITE,
    SUMMARY,
    is_complete,
    read_summary,
    segment_suffix,
)
from lightning_sv.runs.lock import (
    acquire,
    check_run_dir,
    clear_unfinished,
    make_run_dir,
    remove_unused,
    run_dir_of_first_rank,
)
from lightning_sv.settings.data import DataPlan
from lightning_sv.settings.paths import INPUTS

log = logging.getLogger(__name__)

#: keys of a single start of a run, which are null in its config.yaml
_ONLY_THIS_START = ("run_dir", "ckpt_path")


class FitRun(CommandRun):
    """Prepare a run for the Trainer's `fit`, and write its results afterwards.

    ========  =====================================  ============================================
    step      time                                   writes
    ========  =====================================  ============================================
    `check`   before the fit                         nothing, so that a refused run leaves nothing
    `open`    before the fit                         the run directory and its lock
    `begin`   before the first step, with weights    config, tokenizer, event files
    `finish`  after the fit                          the summary of a run with all its steps
    ========  =====================================  ============================================

    `fast_dev_run` uses a temporary directory, because in Lightning it leaves nothing.

    Attributes:
        run_dir: directory of the run, set by `open`
    """

    def __init__(self, cli: Any):
        super().__init__(cli)
        self._checkpoint: LastCheckpoint = cli.config_init["checkpoint"]
        self._messages: list[str] = []
        self._is_dev_run = bool(self.trainer.fast_dev_run)  # type: ignore[attr-defined]
        self._given_dir: str | None = self.config["run_dir"]
        if self._is_dev_run:
            self._given_dir = cli.cleanup.enter_context(TemporaryDirectory())

    # check

    def check(self) -> None:
        """Check that settings, data, devices and checkpoint fit each other; set the steps.

        Raises:
            ConfigError: names the key that does not fit
        """
        if self.trainer.is_global_zero:
            check_run_dir(self._given_dir, self.start.checkpoint, again=self.start.asked_for_last)
        self._check_callbacks()
        self._check_devices()
        self._check_resumed_checkpoint()
        self._load_initial_weights()
        self._announce(self.set_micro_batch())
        self._set_steps()

    def _check_callbacks(self) -> None:
        """Check that the run alone writes last.ckpt: resuming needs its steps and its content."""
        for callback in callbacks_of(self.trainer, ModelCheckpoint):
            if callback.save_last and callback.dirpath is None:
                found = f"save_last of {type(callback).__name__} is {callback.save_last}"
                expected = f"false, because the run itself writes {LAST}"
                raise ConfigError(f"{found}; expected {expected}. Or set its dirpath.")

    def _check_devices(self) -> None:
        """Check that model, corpus and batch fit the strategy and the number of devices."""
        trainer = self.trainer
        is_sharded = isinstance(trainer.strategy, FullyShardedStrategy)
        check_compiled(self.model.settings.compile, is_sharded=is_sharded)
        self.check_corpus()
        self.data.share(trainer.world_size)
        self.data.check_validation(trainer.world_size)

    def _check_resumed_checkpoint(self) -> None:
        """Check the checkpoint that the run resumes, if there is one."""
        path = self.start.checkpoint
        if path is not None:
            checkpoint = self.read_checkpoint(path)
            check_resumed_settings(checkpoint, path, self.model, self.data, self.config)

    def _load_initial_weights(self) -> None:
        """Give a new run the weights of `init_from`, if it is set."""
        init_from = self.model.settings.init_from
        if init_from is None or self.start.checkpoint is not None:
            return
        weights = read_start(init_from, self.model.settings, self.data)
        self.model.start_from(weights)
        self._announce(weights.text)

    def _announce(self, message: str | None) -> None:
        """Keep a sentence for `open`, which prints it after the plan."""
        if message is not None:
            self._messages.append(message)

    def _set_steps(self) -> None:
        """Set accumulation, steps and the interval of validations for these devices."""
        trainer = self.trainer
        plan = DataPlan(self.data, trainer.world_size)
        trainer.accumulate_grad_batches = plan.accumulate
        if self._is_dev_run:
            return
        steps = plan.steps(trainer.max_steps, trainer.max_epochs, trainer.limit_train_batches)
        self._check_not_done(steps)
        trainer.fit_loop.epoch_loop.max_steps = steps
        interval = plan.validation_interval(steps)
        trainer.val_check_interval = interval  # type: ignore[attr-defined]

    def _check_not_done(self, steps: int) -> None:
        """Refuse a run of fewer steps than its checkpoint, which would be complete at once."""
        key = "trainer.max_steps"
        if steps < self.trainer.max_steps:
            key = "the number of steps of trainer.max_epochs"
        expected = f"{self.start.step} or more, the step of the checkpoint. Increase it."
        expect(steps >= self.start.step, key, steps, expected)

    # open

    def open(self) -> None:
        """Lock the run directory, print the plan, and connect the Trainer to the directory."""
        signals = self._checkpoint.signals
        self.cli.cleanup.callback(signals.leave)
        if self.trainer.is_global_zero:
            self.run_dir = self._make_run_dir()
            self._lock()
            self._print_plan()
        else:
            self.run_dir = run_dir_of_first_rank(self._given_dir)
        self._connect()
        signals.listen(self.trainer)

    def _make_run_dir(self) -> Path:
        settings = self.model.settings
        seed = self.config["seed_everything"]
        name = f"{settings.backbone.name}/{settings.label}-seed{seed}"
        return make_run_dir(name, self._given_dir, self.start.checkpoint)

    def _lock(self) -> None:
        if self._given_dir is None:
            self.cli.cleanup.callback(remove_unused, self.run_dir)
        lock = acquire(self.run_dir, self.start.checkpoint, again=self.start.asked_for_last)
        self.cli.cleanup.callback(lock.release)
        check_not_replaced(self.start)

    def _print_plan(self) -> None:
        console = Console(stderr=self.config["json"])
        print_groups(console, self.model, self.trainer.max_steps, self.data)
        for message in self._messages:
            console.print(message, highlight=False, soft_wrap=True)

    def _connect(self) -> None:
        """Let callbacks, loggers and Lightning write to the run directory."""
        trainer = self.trainer
        if self.config["json"]:
            self.cli.config_init["progress"].stream = sys.stderr  # stdout has the results
        self._checkpoint.path = self.run_dir / LAST
        if self.cli.script is not None:
            self._checkpoint.program = ["python", self.cli.script]
        # `begin` opens the loggers, so it comes before any callback that writes.
        trainer.callbacks.insert(0, _Begin(self))  # type: ignore[attr-defined]
        folder = self.run_dir.absolute()
        # Under SLURM Lightning resumes any hpc_ckpt_*.ckpt of its root, by default that of the
        # working directory.
        trainer._default_root_dir = str(folder)  # type: ignore[attr-defined]
        loggers = [self._run_logger(folder)]
        if not self._is_dev_run:
            loggers += several(self.cli.config_init["trainer"]["logger"])
        trainer.loggers = loggers

    def _run_logger(self, folder: Path) -> Logger:
        logger = RunLogger(
            folder.parent,
            name="",
            version=folder.name,
            default_hp_metric=False,
            filename_suffix=segment_suffix(folder),
        )
        logger.tokens_per_step = self.data.tokens_per_step
        return logger

    # begin

    def begin(self) -> None:
        """Write config and tokenizer, and open the loggers, after all checks."""
        if not self.trainer.is_global_zero:
            return
        if self.start.checkpoint is None:
            clear_unfinished(self.run_dir)
        (self.run_dir / SUMMARY).unlink(missing_ok=True)  # of a shorter run
        (self.run_dir / NONFINITE).unlink(missing_ok=True)  # of an earlier start
        tokenizer = Tokenizer.load(self.data.folder)
        tokenizer.save(self.run_dir)  # for `generate`, which does not read the corpus
        self._write_config()
        for logger in self.trainer.loggers:
            if isinstance(logger, RunLogger):
                logger.opened = True
            logger.log_hyperparams(hyperparameters(self.trainer, self.model, self.data))

    def _write_config(self) -> None:
        config = self.config.clone()
        for key in _ONLY_THIS_START:
            config[key] = None
        for key in INPUTS:  # the run may be resumed in a different folder
            path = config[key]
            if path is not None and not is_remote(path):
                config[key] = str(Path(path).absolute())
        write_atomically(self.run_dir / CONFIG, self.cli.parser.dump(config, skip_none=False))

    # finish

    def finish(self) -> dict[str, Any] | None:
        """Write and show the summary of a run that reached its last step.

        Returns:
            The summary on the first rank; None on others, and if the run is not complete.
        """
        trainer = self.trainer
        if trainer.global_step < trainer.max_steps or self._is_dev_run:
            return None
        has_trained = self.start.step < trainer.max_steps
        if has_trained:
            self._write_summary()
        else:
            self._finish_earlier_start()
        if not trainer.is_global_zero:
            return None
        summary = read_summary(self.run_dir)
        show_summary(summary, self.run_dir, as_json=self.config["json"])
        return summary

    def _finish_earlier_start(self) -> None:
        """Write the summary of a run without steps left, if a kill has left it without one."""
        trainer = self.trainer
        has_summary = trainer.strategy.broadcast(is_complete(self.run_dir))  # rank 0's directory
        if has_summary:
            log.info("nothing to do: the checkpoint is at step %d, the last", trainer.global_step)
            return
        trainer.validate(self.model, datamodule=self.cli.datamodule, verbose=False)
        self.begin()  # the fit had no step left, so it has not begun
        self._write_summary()

    def _write_summary(self) -> None:
        self.check_validated()
        if not self.trainer.is_global_zero:
            return
        summary = summarize(self.trainer, self.model, self.data)
        for logger in self.trainer.loggers:
            logger.finalize("success")
        write_atomically(self.run_dir / SUMMARY, json.dumps(summary, indent=2) + "\n")


class _Begin(L.Callback):
    """Begin a run when training starts, which is after a checkpoint was restored."""

    def __init__(self, run: FitRun):
        self._run = run

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin the run."""
        self._run.begin()
