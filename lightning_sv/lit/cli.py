"""`lightning-sv fit` and `validate`: LightningCLI with this project's run directory and checks."""

import atexit
import json
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from enum import Enum
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
import yaml
from jsonargparse.util import import_object
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from rich.console import Console

from lightning_sv.atomic import write_atomically
from lightning_sv.corpus import Tokenizer, is_remote
from lightning_sv.corpus.sampler import limited
from lightning_sv.errors import ConfigError, StoppedError, expect, expect_known
from lightning_sv.json_text import json_text
from lightning_sv.lit.checkpoint.atomic_io import AtomicCheckpointIO
from lightning_sv.lit.checkpoint.compat import check_learning_rate, check_settings, has_own_groups
from lightning_sv.lit.data import TokenDataModule
from lightning_sv.lit.distributed import StopSignals, end_at_once, exit_code, join_ranks, leave_group
from lightning_sv.lit.fsdp import FullyShardedStrategy
from lightning_sv.lit.init_from import read_start, with_sizes
from lightning_sv.lit.logger import RunLogger
from lightning_sv.lit.module import LOSSES, PretrainModule
from lightning_sv.lit.summary import (
    has_baseline,
    hyperparameters,
    print_groups,
    show_summary,
    summarize,
    write_parameters,
)
from lightning_sv.log import quiet_libraries, start_logging
from lightning_sv.plan.micro_batch import choose_micro_batch
from lightning_sv.runs.checkpoint import check_checkpoint
from lightning_sv.runs.directory import (
    CONFIG,
    LAST,
    SUMMARY,
    is_complete,
    read_config,
    read_summary,
    run_of,
    segment_suffix,
)
from lightning_sv.runs.lock import acquire, clear_unfinished, find_last_checkpoint, remove_unused, resolve_run_dir
from lightning_sv.runs.output import message_of
from lightning_sv.runs.trust import check_resumed, split_allow
from lightning_sv.settings.data import DataConfig
from lightning_sv.settings.parse import Parser, add_run, config_files, dropped_entries
from lightning_sv.settings.paths import INPUTS
from lightning_sv.settings.words import underscored
from lightning_sv.settings.trainer import check_plugins, check_trainer_keys, prepare_process
from lightning_sv.settings.yaml_file import CALLBACKS, leaves

log = logging.getLogger(__name__)

COMMANDS = ("fit", "validate")
_HELP = """usage: {prog} --config FILE [--config FILE ...] [--KEY VALUE ...]

FILE is a YAML file, or a name in conf/experiment, e.g. tiny-unified. Its comments explain the keys. Later values win.

  --run_dir DIR             directory of the run; runs/MODEL/STRATEGY-seedSEED by default
  --ckpt_path FILE          checkpoint to resume or validate; `last` for that of the run directory
  --seed_everything N       seed of the initialization and of the order of the data
  --model.scale STRATEGY    e.g. llama, unified or hg+dp+or
  --model.optim.lr X        peak learning rate
  --data.corpus.dir DIR     corpus, written by `lightning-sv prepare`
  --trainer.max_steps N     optimizer steps; by default they follow from --model.tokens_per_param
  --trainer.callbacks+=CLASS, --trainer.logger CLASS
                            class of Lightning, or your own; --trainer.callbacks.help CLASS lists its options
  --json                    print the results as JSON
  --dry_run                 check keys, values and model without a corpus, and exit
  --print_config            print the config and exit

{prog} --help_all lists all keys, with types, units and defaults.
"""

# the default of Timer's interval is an enum, which a config could not hold
yaml.add_multi_representer(Enum, lambda dumper, value: dumper.represent_data(value.value), yaml.SafeDumper)


#: settings of a resumed run that its checkpoint does not have
_KEPT = (
    "seed_everything", "model.seed", "data.seed", "data.val_sequences", "data.full_last_validation",
    "trainer.gradient_clip_val",
)  # fmt: skip


#: keys that may differ between the ranks of a run
_OF_A_RANK = ("config", "run_dir", "json", "data.corpus.dir", "data.num_workers")


class RunParser(Parser, LightningArgumentParser):
    """LightningCLI's parser: `--help` is short, `--help_all` lists all keys."""

    def parse_args(self, args: Sequence[str], **kwargs: Any) -> Any:
        """Parse, or print all keys."""
        if "--help_all" in args:
            self._print_message(super().format_help(), sys.stdout)
            self.exit()
        printing = [word for word in args if word.partition("=")[0] == "--print_config"]  # it would end the parsing
        config = super().parse_args([*(word for word in args if word not in printing), *printing], **kwargs)
        for sentence in dropped_entries(config_files(args), config["trainer"]):
            log.warning("%s", sentence)
        return config

    def format_help(self) -> str:
        """Return the most used keys of a run, or all options of a class."""
        is_run = any(action.dest == "run_dir" for action in self._actions)
        return _HELP.format(prog=self.prog) if is_run else str(super().format_help())


class PretrainCLI(LightningCLI):
    """LightningCLI for `PretrainModule` and `TokenDataModule`; subclasses work as those of LightningCLI.

    Adds `run_dir`, derives trainer.max_steps from the token budget, and sets the run's callbacks, logger and
    checkpoints, so that a run directory is always complete.

    Args:
        model_class: `PretrainModule` or a subclass, whose arguments are the keys of `model`
        args: command, `fit` or `validate`, and its arguments; None for those of the program, which then exits with
            code 2 and one sentence if they are wrong

    Attributes:
        command: `fit` or `validate`
        batches: section `data` of the config
        run_dir: directory of the run
        summary: results of a finished run on the first rank, else None

    Raises:
        ConfigError: wrong arguments
        StoppedError: a signal has ended the run
    """

    model_class: type[PretrainModule]
    model: PretrainModule
    datamodule: TokenDataModule
    batches: DataConfig
    run_dir: Path
    summary: dict[str, Any] | None = None
    _begun = False  # Lightning restores a checkpoint before, without checking its entries

    def __init__(self, model_class: type[PretrainModule] = PretrainModule, args: Sequence[str] | None = None):
        if args is None:
            start_logging()
        quiet_libraries()
        prepare_process()
        atexit.register(leave_group)
        program = "lightning-sv" if args is not None else Path(sys.argv[0]).name
        self.command, *words = (sys.argv[1:] if args is None else args) or [""]
        self._signals = StopSignals()
        try:
            expect_known("command", self.command, COMMANDS)
            with ExitStack() as self._cleanup:  # ends with the command, however that ends
                super().__init__(
                    model_class,
                    args=words,  # type: ignore[arg-type]
                    run=False,
                    parser_class=RunParser,
                    parser_kwargs={"prog": f"{program} {self.command}", "parser_mode": "omegaconf+"},
                    seed_everything_default=0,
                    save_config_callback=None,
                    auto_configure_optimizers=False,  # model.optim and model.schedule set them
                )
                self._run()
        except Exception as end:
            if args is not None:  # the caller handles it, and requeues a stopped job
                raise
            message, code = ("", exit_code(end)) if isinstance(end, StoppedError) else message_of(end) or ("", None)
            if code is None:
                raise
            if message:
                log.error("%s", message)
            end_at_once(code)
            sys.exit(code)

    def _run(self) -> None:
        """Call `before_fit`, the Trainer's `fit` and `after_fit`, or those of `validate`."""
        given = {key: self.config_init[key] for key in self._method_keys}
        try:
            getattr(self, f"before_{self.command}")()
            getattr(self.trainer, self.command)(self.model, datamodule=self.datamodule, **given)
            getattr(self, f"after_{self.command}")()
        except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
            resumes = given["ckpt_path"] is not None and self.command == "fit" and not self._begun
            if resumes and message_of(error) is None:
                why = " ".join(str(error).split())
                raise ConfigError(f"the checkpoint cannot be resumed ({type(error).__name__}: {why}).") from error
            raise

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse, after adding the sizes of a transformers model and checking the imports of a resumed config."""
        words, allow = split_allow(underscored(args))
        check_resumed(words, allow)
        self.config = parser.parse_args(with_sizes(words) if self.command == "fit" else words)

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the sections trainer, model and data."""
        add_run(parser, self.model_class, self.trainer_class)

    def instantiate_classes(self) -> None:
        """Build the model, the data module and the trainer."""
        self.config_init = self.parser.instantiate(self.config)
        self.model, self.batches = self.config_init["model"], self.config_init["data"]
        self.datamodule = TokenDataModule.from_batches(self.batches)
        self.trainer = self.instantiate_trainer()

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add a run's further options and callbacks; a subclass calls this before it adds its own."""
        help_run_dir = "Directory of the run; null for runs/<model>/<strategy>-seed<seed>, and a number if that exists."
        parser.add_argument("--run_dir", type=str | None, default=None, help=help_run_dir)
        help_jump = "Resume with a different trainer.max_steps even if the learning rate jumps."
        parser.add_argument("--allow_lr_jump", type=bool, nargs="?", const=True, default=False, help=help_jump)
        help_json = "Print the final figures as JSON, the rest on stderr."
        parser.add_argument("--json", type=bool, nargs="?", const=True, default=False, help=help_json)
        if self.model_class is not PretrainModule:  # so that the commands of lightning-sv refuse the config
            help_class = "Class of the model, recorded in config.yaml; it cannot be changed."
            parser.add_argument("--model_class", type=str, default=self.model_class.__name__, help=help_class)
        for section, callback in CALLBACKS.items():
            parser.add_lightning_class_args(import_object(callback), section)
        parser.set_defaults({"samples.tokens": 0})
        skip = self.subcommands()[self.command]
        self._method_keys = parser.add_method_arguments(self.trainer_class, self.command, skip=skip)
        if self.command == "validate":
            parser.set_defaults({"verbose": False})  # after_validate prints the loss

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Build the trainer, with max_steps from the budget if not set, and choose the run directory."""
        model, data = self.model.settings, self.batches
        given = self.config_init["trainer"]
        kwargs["logger"] = False
        kwargs["enable_autolog_hparams"] = False  # `_begin` logs those of module, data and trainer
        if isinstance(given["strategy"], FullyShardedStrategy):
            kwargs["inference_mode"] = False  # FSDP2 reads version counters, which inference tensors lack
        plugins = _several(given["plugins"])
        check_plugins(plugins)
        kwargs["plugins"] = [AtomicCheckpointIO(), *plugins]
        if self.command == "fit":
            kwargs["log_every_n_steps"] = self.config["scalars"]["every_n_steps"]  # of values that others log
            if given["max_steps"] == -1:
                kwargs["max_steps"] = model.plan.steps_for_budget(data.tokens_per_step)
            begin = LambdaCallback(on_train_start=lambda trainer, module: self._begin())
            kwargs["callbacks"] = [begin, *_several(given["callbacks"])]  # before any callback that writes
            self.config_init["progress"].stream = sys.stderr if self.config["json"] else sys.stdout
            self.config_init["checkpoint"].signals = self._signals
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except (ValueError, TypeError, RuntimeError, MisconfigurationException) as error:
            _check_gpu(given["accelerator"])
            text = str(error).rstrip(".!")
            raise ConfigError(f"trainer: {text}. Check the keys of trainer.") from error
        self._cleanup.push(join_ranks(trainer))
        if self.command == "fit":
            name = f"{model.backbone.name}/{model.label}-seed{self.config['seed_everything']}"
            run_dir, ckpt_path = (self.config[key] for key in ("run_dir", "ckpt_path"))
            if trainer.fast_dev_run:  # type: ignore[attr-defined]  # leaves nothing, as in Lightning
                run_dir = self._cleanup.enter_context(TemporaryDirectory())
            self._resolve = partial(
                resolve_run_dir, name, run_dir, ckpt_path, again=self._again, rank=trainer.global_rank
            )
            self.run_dir = self._resolve()
        return trainer

    def before_instantiate_classes(self) -> None:
        """Check the trainer's keys, and find and check the checkpoint, before anything is built."""
        check_trainer_keys(self.config["trainer"])
        own = self.model_class.__name__
        given = self.config.get("model_class", own)
        expect(given == own, "model_class", given, f"{own}, that of this command line.")
        path = self.config["ckpt_path"]
        self._again = path == "last"
        if self._again:
            self.config["ckpt_path"] = path = find_last_checkpoint(self.config["run_dir"])
        if path is not None:
            check_checkpoint(path, checksums=False)  # before_fit compares them, on one rank per node

    def _check_monitors(self) -> None:
        """Check what EarlyStopping and ModelCheckpoint monitor, unless code of the user may log it."""
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        classes = [type(self.model), *map(type, callbacks)]
        ours = all(kind.__module__.startswith(("lightning.", "lightning_sv.")) for kind in classes)
        if not ours or LearningRateMonitor in classes:
            return
        logged: set[str] = set()
        for callback in callbacks:
            logged |= set(getattr(callback, "tags", ()))
        for callback in callbacks:
            if isinstance(callback, EarlyStopping | ModelCheckpoint):
                key = f"monitor of trainer.callbacks: {type(callback).__name__}"
                is_logged = str(callback.monitor).partition("/")[0] in logged
                known = is_logged or callback.monitor in (None, "epoch", "step", *LOSSES)
                expect(known, key, callback.monitor, f"one of: {' '.join(LOSSES)}.")

    def before_fit(self) -> None:
        """Check, plan and open the run: nothing is written before all of it fits."""
        self._start = (self.config["ckpt_path"], 0)
        self._check_run()
        checkpoint = self._check_resumed()
        messages = [*self._read_start(), *self._plan_steps(checkpoint)]
        self._open(messages)

    def _check_run(self) -> None:
        """Check monitors, sharding and corpus."""
        trainer = self.trainer
        model = self.model.settings
        if model.compile == "model" and isinstance(trainer.strategy, FullyShardedStrategy):
            raise ConfigError("model.compile is model; expected block or none for a sharded model.")
        self._check_monitors()
        self.batches.check(model.backbone.vocab_size, checksums=trainer.local_rank == 0)
        self.batches.share(trainer.world_size)
        self.batches.check_validation(trainer.world_size)

    def _check_resumed(self) -> dict[str, Any] | None:
        """Return the checkpoint that the run resumes, after checking that it has the same settings."""
        path = self.config["ckpt_path"]
        if path is None:
            return None
        checkpoint = check_checkpoint(path, checksums=self.trainer.local_rank == 0)
        self._start = (path, checkpoint["global_step"])
        model = self.model
        own_groups = has_own_groups(model)
        check_settings(
            checkpoint, model.settings, self.batches, training=True, own_groups=own_groups, built_by=model.built_by
        )
        folder = run_of(Path(path))
        recorded = {} if folder is None else leaves(read_config(folder))
        for key in _KEPT:
            now = self.config[key]
            then = recorded.get(key, now)  # the run of an older version lacks newer keys
            if then != now:
                hint = "Resume with the same settings, or start a new run."
                raise ConfigError(f"{key} is {now}; expected {then}, as in the run of the checkpoint. {hint}")
        return checkpoint

    def _read_start(self) -> Iterator[str]:
        """Read the initial weights of a new run, if they are given; yield a sentence about them."""
        init_from = self.model.settings.init_from
        if init_from is None or self.config["ckpt_path"] is not None:
            return
        start = read_start(init_from, self.model.settings, self.batches)
        self.model.start_from(start)
        yield start.text

    def _plan_steps(self, checkpoint: dict[str, Any] | None) -> Iterator[str]:
        """Set accumulation, steps and validations, now that the devices are known; yield sentences about choices."""
        trainer = self.trainer
        choice = self._choose_micro_batch()
        if choice is not None:
            yield choice
        accumulate = self.batches.share(trainer.world_size).accumulate
        trainer.accumulate_grad_batches = accumulate
        trainer.fit_loop.epoch_loop.max_steps = self._count_steps(accumulate)
        if checkpoint is not None and not self.config["allow_lr_jump"] and not self.model.own_optimizer:
            check_learning_rate(checkpoint, self.model.settings, trainer.max_steps)
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            steps_between = math.ceil(trainer.max_steps / self.batches.validations)
            trainer.val_check_interval = steps_between * accumulate  # type: ignore[attr-defined]

    def _open(self, messages: Sequence[str]) -> None:
        """Lock the run directory, print the plan, and set the loggers and the checkpoint of the run."""
        trainer = self.trainer
        self._cleanup.callback(self._signals.leave)
        if trainer.is_global_zero:
            self._lock_run_dir()
            console = Console(stderr=self.config["json"])
            print_groups(console, self.model, trainer.max_steps, self.batches)
            for line in messages:
                console.print(line, highlight=False, soft_wrap=True)
        self.config_init["checkpoint"].path = self.run_dir / LAST
        folder = self.run_dir.absolute()
        # under SLURM Lightning resumes any hpc_ckpt_*.ckpt of its root, which is the working directory if not set
        trainer._default_root_dir = str(folder)  # type: ignore[attr-defined]
        given = [] if trainer.fast_dev_run else _several(self.config_init["trainer"]["logger"])  # type: ignore[attr-defined]
        trainer.loggers = [self._run_logger(folder), *given]
        self._signals.listen(trainer)
        self.datamodule.shared = self._shared_values()

    def _lock_run_dir(self) -> None:
        self.run_dir = self._resolve(create=True)
        if self.config["run_dir"] is None:
            self._cleanup.callback(remove_unused, self.run_dir)
        lock = acquire(self.run_dir, self.config["ckpt_path"], again=self._again)
        self._cleanup.callback(lock.release)

    def _run_logger(self, folder: Path) -> RunLogger:
        suffix = segment_suffix(folder)
        logger = RunLogger(folder.parent, name="", version=folder.name, default_hp_metric=False, filename_suffix=suffix)
        logger.tokens_per_step = self.batches.tokens_per_step
        return logger

    def _shared_values(self) -> dict[str, Any]:
        """Return the config and the checkpoint, which all ranks must share."""
        config = self.config.clone()
        for key in _OF_A_RANK:
            config.pop(key, None)
        path, step = self._start
        start = f"{path} at step {step}" if path else "none"
        return config.as_dict() | {"ckpt_path": start}

    def _count_steps(self, accumulate: int) -> int:
        """Return the run's steps: trainer.max_steps, or fewer if max_epochs ends it before."""
        trainer, data = self.trainer, self.batches
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return trainer.max_steps
        steps, limit = data.manifest.train.sequences(data.seq_len) // data.global_batch, trainer.limit_train_batches
        batches = limited(steps * accumulate, limit)
        wanted = f"a number of batches that is a multiple of {accumulate}, those of a step."
        expect(batches % accumulate == 0, "trainer.limit_train_batches", limit, wanted)
        epochs = math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs
        return int(min(trainer.max_steps, epochs * (batches // accumulate)))

    def _begin(self) -> None:
        """Write config, tokenizer and parameters before the first step, after all checks."""
        self._begun = True
        if not self.trainer.is_global_zero:
            return
        config = self.config.clone()
        if config["ckpt_path"] is None:
            clear_unfinished(self.run_dir)
        (self.run_dir / SUMMARY).unlink(missing_ok=True)  # of a shorter run
        Tokenizer.load(self.batches.folder).save(self.run_dir)  # for `generate`, which does not read the corpus
        write_parameters(self.run_dir, self.model)
        config["run_dir"], config["ckpt_path"], config["allow_lr_jump"] = None, None, False  # only for this start
        for key in INPUTS:  # the run may be resumed in a different folder
            if config[key] is not None and not is_remote(config[key]):
                config[key] = str(Path(config[key]).absolute())
        write_atomically(self.run_dir / CONFIG, self.parser.dump(config, skip_none=False))
        for logger in self.trainer.loggers:
            if isinstance(logger, RunLogger):
                logger.opened = True
            logger.log_hyperparams(hyperparameters(self.trainer, self.model, self.batches))

    def _choose_micro_batch(self) -> str | None:
        """Set the micro-batch of a run that gives none; return a sentence about the choice."""
        trainer = self.trainer
        keys = self.config["trainer"].as_dict()
        self.batches, choice = choose_micro_batch(
            self.model.settings, self.batches, keys, trainer.strategy.root_device, trainer.world_size
        )
        self.datamodule.read(self.batches)
        return choice

    def after_fit(self) -> None:
        """Write and show the summary of a run that reached its last step."""
        trainer = self.trainer
        if trainer.global_step < trainer.max_steps or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        was_complete = self._was_complete()
        if not was_complete:
            self._check_validated()
        if not trainer.is_global_zero:
            return
        if was_complete:
            log.info("nothing to do: the checkpoint is at step %d, the last", trainer.global_step)
            self.summary = read_summary(self.run_dir)
        else:
            self.summary = self._write_summary()
        plain = type(self) is PretrainCLI and self.model_class is PretrainModule  # else compare refuses the config
        compared = self.model.settings if plain and has_baseline(self.model.settings, self.batches) else None
        show_summary(self.summary, self.run_dir, compared=compared, as_json=self.config["json"])

    def _was_complete(self) -> bool:
        """Return True if this start resumed a complete run; validate one that stopped before its last validation."""
        trainer = self.trainer
        starts_at_last_step = self._start[1] >= trainer.max_steps
        if not starts_at_last_step:
            return False
        # All devices validate, or none; only the first knows the run's directory.
        was_complete: bool = trainer.strategy.broadcast(is_complete(self.run_dir))
        if not was_complete:
            trainer.validate(self.model, datamodule=self.datamodule, verbose=False)
            self._begin()
        return was_complete

    def _write_summary(self) -> dict[str, Any]:
        summary = summarize(self.trainer, self.model, self.batches)
        for logger in self.trainer.loggers:
            logger.finalize("success")
        write_atomically(self.run_dir / SUMMARY, json.dumps(summary, indent=2) + "\n")
        return summary

    def _check_validated(self) -> None:
        given, wanted = "val/loss" in self.trainer.callback_metrics, "self.log('val/loss', ...) in validation_step."
        expect(given, "the validation of the model", "without val/loss", wanted)

    def before_validate(self) -> None:
        """Check checkpoint and corpus."""
        path = self.config["ckpt_path"]
        expect(bool(path), "ckpt_path", "not set", f"a checkpoint to validate. Add --ckpt_path RUN/{LAST}.")
        checkpoint = check_checkpoint(path, checksums=self.trainer.local_rank == 0)
        self._start = (path, checkpoint["global_step"])
        self.batches.check(self.model.settings.backbone.vocab_size, checksums=self.trainer.local_rank == 0)
        self._choose_micro_batch()
        self.datamodule.shared = self._shared_values()

    def after_validate(self) -> None:
        """Show the validation loss."""
        self._check_validated()
        loss = self.trainer.callback_metrics["val/loss"]
        if self.trainer.is_global_zero:
            corpus = self.batches.manifest.corpus_hash
            figures = {"val_loss": float(loss), "val_perplexity": float(loss.exp()), "corpus_hash": corpus}
            text = f"val/loss {figures['val_loss']:.4f} nats/token, perplexity {figures['val_perplexity']:.2f}"
            text += f", of corpus {corpus[:12]} in {self.batches.corpus.dir}"
            print(json_text(figures, indent=None) if self.config["json"] else text)


def _check_gpu(accelerator: Any) -> None:
    """Refuse a GPU that torch does not see."""
    if accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        build = "is a build for CPUs" if torch.version.cuda is None else "finds no driver or card"
        seen = f"cpu, because torch {torch.__version__} sees no GPU: it {build}"
        raise ConfigError(f"trainer.accelerator is {accelerator}; expected {seen}. With make set TRAINER=cpu.")


def _several(value: Any) -> list[Any]:
    """Return the objects of a Trainer argument that is None, a switch, one object or a list."""
    if value is None or isinstance(value, bool):
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
