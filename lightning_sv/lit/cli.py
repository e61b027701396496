"""`lightning-sv fit` and `validate`: LightningCLI with this project's run directory and checks."""

import atexit
import json
import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import lightning as L
import torch
from jsonargparse.util import import_object
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from rich.console import Console

from lightning_sv.atomic import write_atomically
from lightning_sv.corpus import Tokenizer, is_remote
from lightning_sv.errors import ConfigError, StoppedError, expect
from lightning_sv.json_text import json_text
from lightning_sv.lit.checkpoint.atomic_io import AtomicCheckpointIO
from lightning_sv.lit.checkpoint.compat import (
    check_learning_rate,
    check_settings,
    has_own_groups,
)
from lightning_sv.lit.data import TokenDataModule
from lightning_sv.lit.distributed import end_at_once, join_ranks, leave_group
from lightning_sv.lit.fsdp import FullyShardedStrategy
from lightning_sv.lit.init_from import read_start, with_sizes
from lightning_sv.lit.logger import RunLogger
from lightning_sv.lit.module import PretrainModule
from lightning_sv.lit.run_parser import RunParser, command_of
from lightning_sv.lit.signals import StopSignals, exit_code
from lightning_sv.lit.summary import (
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
from lightning_sv.runs.lock import (
    acquire,
    clear_unfinished,
    find_last_checkpoint,
    remove_unused,
    resolve_run_dir,
)
from lightning_sv.runs.output import message_of
from lightning_sv.runs.trust import check_resumed, split_allow
from lightning_sv.settings.data import DataConfig, DataPlan
from lightning_sv.settings.parse import add_run
from lightning_sv.settings.paths import INPUTS
from lightning_sv.settings.sections import CALLBACKS, leaves
from lightning_sv.settings.trainer import check_trainer_keys, prepare_process
from lightning_sv.settings.words import underscored

log = logging.getLogger(__name__)

#: keys of a single start of a run, which its config.yaml does not have, and their values in it
_ONLY_THIS_START = {"run_dir": None, "ckpt_path": None, "allow_lr_jump": False}
#: settings of a resumed run that its checkpoint does not have
_KEPT = (
    "seed_everything", "model.seed", "data.seed", "data.val_sequences", "data.full_last_validation",
    "trainer.gradient_clip_val",
)  # fmt: skip
#: keys that may differ between the ranks of a run
_OF_A_RANK = ("config", "run_dir", "json", "data.corpus.dir", "data.num_workers")
#: errors of torch and Lightning for a checkpoint with damaged entries
_DAMAGED = (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError)


@dataclass(frozen=True)
class StartingPoint:
    """Where a start of a run begins, known before anything is built.

    Attributes:
        checkpoint: path of the checkpoint; None for a new run
        step: step of the checkpoint; 0 for a new run
        asked_for_last: whether the command said `--ckpt_path last`, which a first start may say too
    """

    checkpoint: str | None
    step: int
    asked_for_last: bool


class PretrainCLI(LightningCLI):
    """LightningCLI for `PretrainModule` and `TokenDataModule`; its subclasses work too.

    Adds `run_dir`, derives trainer.max_steps from the token budget, and sets the run's callbacks,
    logger and checkpoints, so that a run directory is always complete.

    Args:
        model_class: `PretrainModule` or a subclass, whose arguments are the keys of `model`
        args: command, `fit` or `validate`, and its arguments; None for those of the program, which
            then exits with code 2 and one sentence if they are wrong

    Attributes:
        command: `fit` or `validate`
        data: section `data` of the config
        run_dir: directory of the run
        summary: results of a finished run on the first rank, else None

    Raises:
        ConfigError: wrong arguments
        StoppedError: a signal has ended the run
    """

    model_class: type[PretrainModule]
    model: PretrainModule
    datamodule: TokenDataModule
    data: DataConfig
    run_dir: Path
    summary: dict[str, Any] | None = None
    #: whether training has started; Lightning restores a checkpoint before
    _begun = False

    def __init__(
        self,
        model_class: type[PretrainModule] = PretrainModule,
        *,
        args: Sequence[str] | None = None,
    ):
        if args is not None:  # the caller handles errors, and requeues a stopped job
            self._start("lightning-sv", model_class, args)
            return
        start_logging()
        try:
            self._start(Path(sys.argv[0]).name, model_class, sys.argv[1:])
        except Exception as end:
            _exit_after(end)

    def _start(self, program: str, model_class: type[PretrainModule], args: Sequence[str]) -> None:
        """Parse, build and run; what `_cleanup` has ends with the command, however that ends."""
        quiet_libraries()
        prepare_process()
        atexit.register(leave_group)
        self.command = command_of(program, args)
        self._signals = StopSignals()
        with ExitStack() as self._cleanup:
            super().__init__(
                model_class,
                args=args[1:],  # type: ignore[arg-type]
                run=False,
                parser_class=RunParser,
                parser_kwargs={
                    "prog": f"{program} {self.command}",
                    "parser_mode": "omegaconf+",
                },
                seed_everything_default=0,
                save_config_callback=None,
                auto_configure_optimizers=False,  # model.optim and model.schedule set them
            )
            self._run()

    def _run(self) -> None:
        """Call `before_fit`, the Trainer's `fit` and `after_fit`, or those of `validate`."""
        try:
            getattr(self, f"before_{self.command}")()
            self._run_trainer()
            getattr(self, f"after_{self.command}")()
        except _DAMAGED as error:
            is_resuming = self.command == "fit" and self._starting_point.checkpoint is not None
            if not is_resuming or self._begun or message_of(error) is not None:
                raise
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ConfigError(f"the checkpoint cannot be resumed ({reason}).") from error

    def _run_trainer(self) -> None:
        run = getattr(self.trainer, self.command)
        arguments = {key: self.config_init[key] for key in self._method_keys}
        run(self.model, datamodule=self.datamodule, **arguments)

    # The arguments

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse, after a check of a resumed config; add the sizes of a transformers model."""
        words, allow = split_allow(underscored(args))
        check_resumed(words, allow)
        if self.command == "fit":
            words = with_sizes(words)
        self.config = parser.parse_args(words)

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the sections trainer, model and data."""
        add_run(parser, self.model_class, self.trainer_class)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add a run's options and callbacks; a subclass calls this before it adds its own."""
        parser.add_argument(
            "--run_dir",
            type=str | None,
            default=None,
            help="Directory of the run; null for runs/<model>/<strategy>-seed<seed>, and a number "
            "if that exists.",
        )
        _add_switch(
            parser,
            "--allow_lr_jump",
            "Resume with a different trainer.max_steps even if the learning rate jumps.",
        )
        _add_switch(parser, "--json", "Print the final figures as JSON, the rest on stderr.")
        if self.model_class is not PretrainModule:  # lightning-sv refuses the config by this key
            parser.add_argument(
                "--model_class",
                type=str,
                default=self.model_class.__name__,
                help="Class of the model, recorded in config.yaml; it cannot be changed.",
            )
        for section, callback in CALLBACKS.items():
            parser.add_lightning_class_args(import_object(callback), section)
        parser.set_defaults({"samples.tokens": 0})
        self._add_method_arguments(parser)

    def _add_method_arguments(self, parser: LightningArgumentParser) -> None:
        """Add the arguments of the Trainer's `fit` or `validate`, such as ckpt_path."""
        skip = self.subcommands()[self.command]
        self._method_keys = parser.add_method_arguments(self.trainer_class, self.command, skip=skip)
        if self.command == "validate":
            parser.set_defaults({"verbose": False})  # after_validate prints the loss

    def before_instantiate_classes(self) -> None:
        """Check the trainer's keys, and find and check the checkpoint, before anything is built."""
        check_trainer_keys(self.config["trainer"])
        _check_gpu(self.config["trainer"]["accelerator"])
        own = self.model_class.__name__
        given = self.config.get("model_class", own)
        if given != own:
            raise ConfigError(f"model_class is {given}; expected {own}, that of this command line.")
        self._starting_point = self._find_starting_point()

    def _find_starting_point(self) -> StartingPoint:
        """Find the checkpoint of `--ckpt_path`, and check its content without checksums."""
        path = self.config["ckpt_path"]
        asked_for_last = path == "last"
        if asked_for_last:
            path = find_last_checkpoint(self.config["run_dir"])
            self.config["ckpt_path"] = path
        if path is None:
            return StartingPoint(None, 0, asked_for_last)
        checkpoint = check_checkpoint(path, checksums=False)  # before_fit checks them once per node
        return StartingPoint(path, checkpoint.get("global_step", 0), asked_for_last)

    # Model, data and trainer

    def instantiate_classes(self) -> None:
        """Build the model, the data module and the trainer."""
        self.config_init = self.parser.instantiate(self.config)
        self.model = self.config_init["model"]
        self.data = self.config_init["data"]
        self.datamodule = TokenDataModule.from_settings(self.data)
        self.trainer = self.instantiate_trainer()

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Build the trainer, with max_steps from the budget; choose the run directory."""
        kwargs |= self._trainer_arguments()
        if self.command == "fit":
            kwargs |= self._fit_arguments()
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except (ValueError, TypeError, RuntimeError, MisconfigurationException) as error:
            reason = str(error).rstrip(".!")
            raise ConfigError(f"trainer: {reason}. Check the keys of trainer.") from error
        self._cleanup.push(join_ranks(trainer))
        if self.command == "fit":
            if _is_dev_run(trainer):  # leaves nothing, as in Lightning
                self.config["run_dir"] = self._cleanup.enter_context(TemporaryDirectory())
            self.run_dir = self._find_run_dir(trainer, create=False)
        return trainer

    def _trainer_arguments(self) -> dict[str, Any]:
        """Return the arguments of the Trainer that are not those of the config."""
        given = self.config_init["trainer"]
        plugins = _several(given["plugins"])
        for plugin in plugins:
            is_followed = isinstance(plugin, ClusterEnvironment)
            expected = "cluster environments. The keys of trainer set everything else."
            expect(is_followed, "trainer.plugins", type(plugin).__name__, expected)
        arguments: dict[str, Any] = {
            "logger": False,  # `_open` sets it
            "enable_autolog_hparams": False,  # `_begin` logs those of module, data and trainer
            "plugins": [AtomicCheckpointIO(), *plugins],
        }
        if isinstance(given["strategy"], FullyShardedStrategy):
            # FSDP2 reads version counters, which inference tensors lack.
            arguments["inference_mode"] = False
        return arguments

    def _fit_arguments(self) -> dict[str, Any]:
        """Return the Trainer's arguments that only a fit has, and connect the run's callbacks."""
        given = self.config_init["trainer"]
        self.config_init["progress"].stream = sys.stderr if self.config["json"] else sys.stdout
        self.config_init["checkpoint"].signals = self._signals
        begin = LambdaCallback(on_train_start=lambda trainer, module: self._begin())
        arguments: dict[str, Any] = {
            # the interval of values that Lightning's callbacks log; `TrainingMonitor` has its own
            "log_every_n_steps": self.config["scalars"]["every_n_steps"],
            # `_begin` opens the loggers, so it comes before any callback that writes
            "callbacks": [begin, *_several(given["callbacks"])],
        }
        if given["max_steps"] == -1:
            plan = self.model.settings.plan
            arguments["max_steps"] = plan.steps_for_budget(self.data.tokens_per_step)
        return arguments

    def _find_run_dir(self, trainer: L.Trainer, *, create: bool) -> Path:
        """Return the run directory, which only rank 0 creates, when all checks have passed."""
        settings = self.model.settings
        seed = self.config["seed_everything"]
        return resolve_run_dir(
            f"{settings.backbone.name}/{settings.label}-seed{seed}",
            self.config["run_dir"],
            self._starting_point.checkpoint,
            again=self._starting_point.asked_for_last,
            rank=trainer.global_rank,
            create=create,
        )

    # What fit and validate check, with checksums once per node

    def _check_corpus(self) -> None:
        is_first = self.trainer.local_rank == 0
        self.data.check(self.model.settings.backbone.vocab_size, checksums=is_first)

    def _read_checkpoint(self, path: str) -> dict[str, Any]:
        return check_checkpoint(path, checksums=self.trainer.local_rank == 0)

    # fit

    def before_fit(self) -> None:
        """Check, plan and open the run: nothing is written before all of it fits."""
        self._check_run()
        checkpoint = self._check_resumed()
        start = self._read_start()
        choice = self._choose_micro_batch()
        self._set_steps()
        self._check_rate(checkpoint)
        self._open([sentence for sentence in (start, choice) if sentence is not None])

    def _check_run(self) -> None:
        """Check sharding and corpus."""
        trainer = self.trainer
        model = self.model.settings
        if model.compile == "model" and isinstance(trainer.strategy, FullyShardedStrategy):
            raise ConfigError("model.compile is model; expected block or none if it is sharded.")
        self._check_corpus()
        self.data.share(trainer.world_size)
        self.data.check_validation(trainer.world_size)

    def _check_resumed(self) -> dict[str, Any] | None:
        """Return the checkpoint that the run resumes, after a check of its settings."""
        path = self._starting_point.checkpoint
        if path is None:
            return None
        checkpoint = self._read_checkpoint(path)
        check_settings(
            checkpoint,
            self.model.settings,
            self.data,
            training=True,
            own_groups=has_own_groups(self.model),
            built_by=self.model.built_by,
        )
        self._check_kept(run_of(Path(path)))
        return checkpoint

    def _check_kept(self, run: Path | None) -> None:
        """Check the settings that a checkpoint does not have, against the config of its run."""
        recorded = {} if run is None else leaves(read_config(run))
        for key in _KEPT:
            value = self.config[key]
            then = recorded.get(key, value)  # the run of an older version lacks newer keys
            if then != value:
                expected = f"{then}, as in the run of the checkpoint"
                hint = "Resume with the same settings, or start a new run."
                raise ConfigError(f"{key} is {value}; expected {expected}. {hint}")

    def _read_start(self) -> str | None:
        """Read the initial weights of a new run, if given; return a sentence about them."""
        init_from = self.model.settings.init_from
        if init_from is None or self._starting_point.checkpoint is not None:
            return None
        start = read_start(init_from, self.model.settings, self.data)
        self.model.start_from(start)
        return start.text

    def _set_steps(self) -> None:
        """Set accumulation, steps and the interval of validations for these devices."""
        trainer = self.trainer
        plan = DataPlan(self.data, trainer.world_size)
        trainer.accumulate_grad_batches = plan.accumulate
        if _is_dev_run(trainer):
            return
        steps = plan.steps(trainer.max_steps, trainer.max_epochs, trainer.limit_train_batches)
        trainer.fit_loop.epoch_loop.max_steps = steps
        interval = plan.validation_interval(steps)
        trainer.val_check_interval = interval  # type: ignore[attr-defined]

    def _check_rate(self, checkpoint: dict[str, Any] | None) -> None:
        """Refuse a resumed run whose learning rate would jump, unless that is allowed."""
        may_jump = self.config["allow_lr_jump"] or self.model.own_optimizer
        if checkpoint is not None and not may_jump:
            check_learning_rate(checkpoint, self.model.settings, self.trainer.max_steps)

    def _choose_micro_batch(self) -> str | None:
        """Set the micro-batch of a run that gives none; return a sentence about the choice."""
        trainer = self.trainer
        keys = self.config["trainer"].as_dict()
        device = trainer.strategy.root_device
        self.data, choice = choose_micro_batch(
            self.model.settings, self.data, keys, device, trainer.world_size
        )
        self.datamodule.read(self.data, self._shared_values())
        return choice

    def _open(self, messages: Sequence[str]) -> None:
        """Lock the run directory, print the plan, and set the run's loggers and checkpoint."""
        trainer = self.trainer
        self._cleanup.callback(self._signals.leave)
        if trainer.is_global_zero:
            self._lock_run_dir()
            console = Console(stderr=self.config["json"])
            print_groups(console, self.model, trainer.max_steps, self.data)
            for line in messages:
                console.print(line, highlight=False, soft_wrap=True)
        self.config_init["checkpoint"].path = self.run_dir / LAST
        folder = self.run_dir.absolute()
        # Under SLURM Lightning resumes any hpc_ckpt_*.ckpt of its root, by default that of the
        # working directory.
        trainer._default_root_dir = str(folder)  # type: ignore[attr-defined]
        loggers = [self._run_logger(folder)]
        if not _is_dev_run(trainer):
            loggers += _several(self.config_init["trainer"]["logger"])
        trainer.loggers = loggers  # type: ignore[assignment]
        self._signals.listen(trainer)

    def _lock_run_dir(self) -> None:
        self.run_dir = self._find_run_dir(self.trainer, create=True)
        if self.config["run_dir"] is None:
            self._cleanup.callback(remove_unused, self.run_dir)
        start = self._starting_point
        lock = acquire(self.run_dir, start.checkpoint, again=start.asked_for_last)
        self._cleanup.callback(lock.release)

    def _run_logger(self, folder: Path) -> RunLogger:
        logger = RunLogger(
            folder.parent,
            name="",
            version=folder.name,
            default_hp_metric=False,
            filename_suffix=segment_suffix(folder),
        )
        logger.tokens_per_step = self.data.tokens_per_step
        return logger

    def _shared_values(self) -> dict[str, Any]:
        """Return the config and the checkpoint, which all ranks must share."""
        config = self.config.clone()
        for key in _OF_A_RANK:
            config.pop(key, None)
        start = self._starting_point
        checkpoint = "none"
        if start.checkpoint is not None:
            checkpoint = f"{start.checkpoint} at step {start.step}"
        return config.as_dict() | {"ckpt_path": checkpoint}

    def _begin(self) -> None:
        """Write config, tokenizer and parameters before the first step, after all checks."""
        self._begun = True
        if not self.trainer.is_global_zero:
            return
        if self._starting_point.checkpoint is None:
            clear_unfinished(self.run_dir)
        (self.run_dir / SUMMARY).unlink(missing_ok=True)  # of a shorter run
        tokenizer = Tokenizer.load(self.data.folder)
        tokenizer.save(self.run_dir)  # for `generate`, which does not read the corpus
        write_parameters(self.run_dir, self.model)
        self._write_config()
        for logger in self.trainer.loggers:
            if isinstance(logger, RunLogger):
                logger.opened = True
            logger.log_hyperparams(hyperparameters(self.trainer, self.model, self.data))

    def _write_config(self) -> None:
        config = self.config.clone()
        for key, value in _ONLY_THIS_START.items():
            config[key] = value
        for key in INPUTS:  # the run may be resumed in a different folder
            path = config[key]
            if path is not None and not is_remote(path):
                config[key] = str(Path(path).absolute())
        write_atomically(self.run_dir / CONFIG, self.parser.dump(config, skip_none=False))

    def after_fit(self) -> None:
        """Write and show the summary of a run that reached its last step."""
        trainer = self.trainer
        if trainer.global_step < trainer.max_steps or _is_dev_run(trainer):
            return
        was_complete = self._was_complete()
        if not was_complete:
            if self._starts_at_the_end():
                self._validate_at_the_end()
            self._check_validated()
        if not trainer.is_global_zero:
            return
        if was_complete:
            log.info("nothing to do: the checkpoint is at step %d, the last", trainer.global_step)
            self.summary = read_summary(self.run_dir)
        else:
            self.summary = self._write_summary()
        show_summary(self.summary, self.run_dir, as_json=self.config["json"])

    def _starts_at_the_end(self) -> bool:
        """Return True if this start resumed a run that had its last step."""
        return self._starting_point.step >= self.trainer.max_steps

    def _was_complete(self) -> bool:
        """Return True if this start resumed a complete run, on all devices alike."""
        if not self._starts_at_the_end():
            return False
        # only the first device knows the run's directory
        was_complete: bool = self.trainer.strategy.broadcast(is_complete(self.run_dir))
        return was_complete

    def _validate_at_the_end(self) -> None:
        """Validate a run that had stopped between its last step and its last validation."""
        self.trainer.validate(self.model, datamodule=self.datamodule, verbose=False)
        self._begin()

    def _write_summary(self) -> dict[str, Any]:
        summary = summarize(self.trainer, self.model, self.data)
        for logger in self.trainer.loggers:
            logger.finalize("success")
        write_atomically(self.run_dir / SUMMARY, json.dumps(summary, indent=2) + "\n")
        return summary

    def _check_validated(self) -> None:
        if "val/loss" not in self.trainer.callback_metrics:
            expected = "self.log('val/loss', ...) in validation_step"
            raise ConfigError(f"val/loss is not logged by the model; expected {expected}.")

    # validate

    def before_validate(self) -> None:
        """Check checkpoint and corpus."""
        path = self._starting_point.checkpoint
        if path is None:
            expected = f"a checkpoint to validate. Add --ckpt_path RUN/{LAST}."
            raise ConfigError(f"ckpt_path is not set; expected {expected}")
        self._read_checkpoint(path)
        self._check_corpus()
        self._choose_micro_batch()

    def after_validate(self) -> None:
        """Show the validation loss."""
        self._check_validated()
        if not self.trainer.is_global_zero:
            return
        loss = self.trainer.callback_metrics["val/loss"]
        corpus = self.data.manifest.corpus_hash
        perplexity = float(loss.exp())
        if self.config["json"]:
            numbers = {"val_loss": float(loss), "val_perplexity": perplexity}
            print(json_text({**numbers, "corpus_hash": corpus}, indent=None))
            return
        losses = f"val/loss {float(loss):.4f} nats/token, perplexity {perplexity:.2f}"
        print(f"{losses}, of corpus {corpus[:12]} in {self.data.corpus.dir}")


def _exit_after(end: Exception) -> NoReturn:
    """Exit with the message and the code of an expected error; raise others again."""
    if isinstance(end, StoppedError):
        code = exit_code(end)
    else:
        expected = message_of(end)
        if expected is None:
            raise end
        message, code = expected
        log.error("%s", message)
    end_at_once(code)
    sys.exit(code)


def _check_gpu(accelerator: Any) -> None:
    """Refuse a GPU that torch does not see."""
    if accelerator not in ("gpu", "cuda") or torch.cuda.is_available():
        return
    build = "is a build for CPUs" if torch.version.cuda is None else "finds no driver or card"
    expected = f"cpu, because torch {torch.__version__} sees no GPU: it {build}"
    hint = "With make set TRAINER=cpu."
    raise ConfigError(f"trainer.accelerator is {accelerator}; expected {expected}. {hint}")


def _add_switch(parser: LightningArgumentParser, name: str, text: str) -> None:
    parser.add_argument(name, type=bool, nargs="?", const=True, default=False, help=text)


def _is_dev_run(trainer: L.Trainer) -> bool:
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


def _several(value: Any) -> list[Any]:
    """Return the objects of a Trainer argument that is None, a switch, one object or a list."""
    if value is None or isinstance(value, bool):
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
