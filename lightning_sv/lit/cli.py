"""`lightning-sv fit` and `validate`: LightningCLI with this project's run directory and checks."""

import atexit
import logging
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
from jsonargparse.util import import_object
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.trainer.connectors import checkpoint_connector

from lightning_sv.errors import ConfigError, StoppedError, expect
from lightning_sv.lit.checkpoint.atomic_io import AtomicCheckpointIO
from lightning_sv.lit.checkpoint.resumed import find_starting_point
from lightning_sv.lit.command_run import several
from lightning_sv.lit.data import TokenDataModule
from lightning_sv.lit.distributed import end_at_once, join_ranks, leave_group
from lightning_sv.lit.fit_run import FitRun
from lightning_sv.lit.module import PretrainModule
from lightning_sv.lit.run_parser import RunParser, command_of
from lightning_sv.lit.signals import exit_code
from lightning_sv.lit.validate_run import ValidateRun
from lightning_sv.log import level_of, quiet_libraries, start_logging, without_levels
from lightning_sv.runs.output import message_of
from lightning_sv.settings.data import DataConfig
from lightning_sv.settings.parse import MAX_SEED, add_run, set_help
from lightning_sv.settings.sections import CALLBACKS
from lightning_sv.settings.trainer import check_trainer_keys, early_ends, prepare_process
from lightning_sv.settings.words import underscored

log = logging.getLogger(__name__)

#: help of LightningCLI's own keys, whose texts describe more than a run does
_HELP = {
    "seed_everything": "Seed of the initialization and of the order of the data, an integer from 0 "
    f"to {MAX_SEED}.",
    "ckpt_path": "Checkpoint to resume or to validate; `last` for that of run_dir.",
    "weights_only": "No effect: a checkpoint is always read with weights_only=True.",
}


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
        script: path of this program; None for `lightning-sv`
        data: section `data` of the config, completed by `before_fit` and `before_validate`
        datamodule: set by `before_fit` and `before_validate`, from `data`
        run_dir: directory of the run, set by `before_fit`
        summary: results of a finished run on the first rank, else None; set by `after_fit`

    Raises:
        ConfigError: wrong arguments
        StoppedError: a signal has ended the run
    """

    model_class: type[PretrainModule]
    model: PretrainModule
    datamodule: TokenDataModule
    data: DataConfig
    run_dir: Path
    script: str | None = None
    summary: dict[str, Any] | None = None
    _fit_run: FitRun
    _validate_run: ValidateRun

    def __init__(
        self,
        model_class: type[PretrainModule] = PretrainModule,
        *,
        args: Sequence[str] | None = None,
    ):
        if args is not None:  # the caller handles errors, and requeues a stopped job
            self._start("lightning-sv", model_class, args)
            return
        self.script, *words = sys.argv
        start_logging(level_of(words))
        try:
            self._start(Path(self.script).name, model_class, without_levels(words))
        except Exception as end:
            _exit_after(end)

    def _start(self, name: str, model_class: type[PretrainModule], args: Sequence[str]) -> None:
        """Parse, build and run; what `cleanup` has ends with the command, however that ends."""
        quiet_libraries()
        prepare_process()
        atexit.register(leave_group)
        self.command = command_of(name, args)
        with ExitStack() as self.cleanup:
            # Lightning calls, in this order and each once,
            #   add_core_arguments_to_parser, add_arguments_to_parser
            #   parse_arguments               sets config
            #   before_instantiate_classes    sets starting_point
            #   instantiate_classes           sets config_init, model, data, trainer
            super().__init__(
                model_class,
                args=args[1:],  # type: ignore[arg-type]
                run=False,
                parser_class=RunParser,
                parser_kwargs={
                    "prog": f"{name} {self.command}",
                    "description": "All keys of a run, with types, units and defaults.",
                    "parser_mode": "omegaconf+",
                },
                seed_everything_default=0,
                save_config_callback=None,
                auto_configure_optimizers=False,  # model.optim and model.schedule set them
            )
            self._run()

    def _run(self) -> None:
        """Call `before_fit`, the Trainer's `fit` and `after_fit`, or those of `validate`."""
        getattr(self, f"before_{self.command}")()
        self._run_trainer()
        getattr(self, f"after_{self.command}")()

    def _run_trainer(self) -> None:
        """Call the Trainer's `fit` or `validate`.

        Raises:
            ConfigError: Lightning or torch cannot restore the checkpoint, e.g. because its
                optimizer has other groups; they raise various errors
        """
        run = getattr(self.trainer, self.command)
        arguments = {key: self.config_init[key] for key in self._method_keys}
        try:
            run(self.model, datamodule=self.datamodule, **arguments)
        except Exception as error:
            is_expected = message_of(error) is not None
            if is_expected or not _is_of_restoring(error):
                raise
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ConfigError(f"the checkpoint cannot be resumed ({reason}).") from error

    # The arguments

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse, with `_` for `-` in the names of options."""
        self.config = parser.parse_args(underscored(args))

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
        parser.add_argument(
            "--json",
            type=bool,
            nargs="?",
            const=True,
            default=False,
            help="Print the final figures as JSON, the rest on stderr.",
        )
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
        set_help(parser, _HELP)

    def _add_method_arguments(self, parser: LightningArgumentParser) -> None:
        """Add the arguments of the Trainer's `fit` or `validate`, such as ckpt_path."""
        skip = self.subcommands()[self.command]
        self._method_keys = parser.add_method_arguments(self.trainer_class, self.command, skip=skip)
        if self.command == "validate":
            parser.set_defaults({"verbose": False})  # after_validate prints the loss

    def before_instantiate_classes(self) -> None:
        """Check the trainer's keys, and find and check the checkpoint, before anything is built."""
        trainer = self.config["trainer"]
        check_trainer_keys(trainer)
        for end in early_ends(trainer):
            log.warning("%s", end)
        own = self.model_class.__name__
        given = self.config.get("model_class", own)
        if given != own:
            raise ConfigError(f"model_class is {given}; expected {own}, that of this command line.")
        start = find_starting_point(self.config["ckpt_path"], self.config["run_dir"])
        self.config["ckpt_path"] = start.checkpoint
        self.starting_point = start

    # Model, data and trainer

    def instantiate_classes(self) -> None:
        """Build the model and the trainer; the data module follows with its micro-batch."""
        self.config_init = self.parser.instantiate(self.config)
        self.model = self.config_init["model"]
        self.data = self.config_init["data"]
        self.trainer = self.instantiate_trainer()

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Build the trainer, with max_steps from the budget."""
        kwargs |= self._trainer_arguments()
        if self.command == "fit":
            kwargs |= self._fit_arguments()
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except (ValueError, TypeError, RuntimeError, MisconfigurationException) as error:
            reason = str(error).rstrip(".!")
            raise ConfigError(f"trainer: {reason}. Check the keys of trainer.") from error
        self.cleanup.push(join_ranks(trainer))
        return trainer

    def _trainer_arguments(self) -> dict[str, Any]:
        """Return the arguments of the Trainer that are not those of the config."""
        plugins = several(self.config_init["trainer"]["plugins"])
        for plugin in plugins:
            is_followed = isinstance(plugin, ClusterEnvironment)
            expected = "cluster environments. The keys of trainer set everything else."
            expect(is_followed, "trainer.plugins", type(plugin).__name__, expected)
        return {
            "logger": False,  # `FitRun.open` sets it
            "enable_autolog_hparams": False,  # `FitRun.begin` logs those of the run
            "plugins": [AtomicCheckpointIO(), *plugins],
        }

    def _fit_arguments(self) -> dict[str, Any]:
        """Return the Trainer's arguments that only a fit has."""
        given = self.config_init["trainer"]
        arguments: dict[str, Any] = {
            # the interval of values that Lightning's callbacks log; `TrainingMonitor` has its own
            "log_every_n_steps": self.config["scalars"]["every_n_steps"],
        }
        if given["max_steps"] == -1:
            plan = self.model.settings.plan
            arguments["max_steps"] = plan.steps_for_budget(self.data.tokens_per_step)
        return arguments

    # The run

    def before_fit(self) -> None:
        """Check and open the run: nothing is written before all of it fits."""
        self._fit_run = FitRun(self)
        self._fit_run.check()
        self._fit_run.open()
        self.run_dir = self._fit_run.run_dir

    def after_fit(self) -> None:
        """Write and show the summary of a run that reached its last step."""
        self.summary = self._fit_run.finish()

    def before_validate(self) -> None:
        """Check checkpoint and corpus."""
        self._validate_run = ValidateRun(self)
        self._validate_run.check()

    def after_validate(self) -> None:
        """Show the validation loss."""
        self._validate_run.finish()


def _is_of_restoring(error: Exception) -> bool:
    """Return True if an error was raised while Lightning restored a checkpoint."""
    names = set[str]()
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals["__name__"] == checkpoint_connector.__name__:
            names.add(frame.f_code.co_name)
    return bool(names) and "dump_checkpoint" not in names  # it is for writing


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
