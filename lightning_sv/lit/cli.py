"""`lightning-sv fit` and `validate`: LightningCLI with this project's run directory and checks."""

import json
import logging
import math
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from jsonargparse import set_parsing_settings
from jsonargparse.util import import_object
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from rich.console import Console

from lightning_sv.corpus import Tokenizer
from lightning_sv.errors import ConfigError
from lightning_sv.lit.checkpoint.settings import check_learning_rate, check_settings
from lightning_sv.lit.checkpoint.start import read_start
from lightning_sv.lit.checkpoint.write import AtomicCheckpointIO
from lightning_sv.lit.data import TokenDataModule
from lightning_sv.lit.logger import RunLogger
from lightning_sv.lit.micro_batch import Fitting, choose_micro_batch
from lightning_sv.lit.module import PretrainModule
from lightning_sv.lit.ranks import check_same_start, join_ranks
from lightning_sv.lit.shard import FullyShardedStrategy
from lightning_sv.lit.signals import StopSignals
from lightning_sv.lit.summary import hyperparameters, print_groups, summarize, write_parameters, write_summary
from lightning_sv.runs.checkpoint import check_checkpoint
from lightning_sv.runs.claim import choose, claim, clear, last_checkpoint
from lightning_sv.runs.directory import CONFIG, LAST, SUMMARY, is_complete, read_summary
from lightning_sv.settings.data import Batches
from lightning_sv.settings.model import is_of_transformers
from lightning_sv.settings.parser import Parser
from lightning_sv.settings.paths import INPUTS
from lightning_sv.settings.sections import CALLBACKS
from lightning_sv.settings.trainer import (
    TRAINER_DEFAULTS,
    check_callbacks,
    check_gpu,
    check_trainer_keys,
    prepare_torch,
)
from lightning_sv.whole import whole, write_atomically

log = logging.getLogger(__name__)


class RunParser(Parser, LightningArgumentParser):
    """LightningCLI's parser, with our errors."""


class PretrainCLI(LightningCLI):
    """LightningCLI for `PretrainModule` and `TokenDataModule`.

    Adds `run_dir`, derives trainer.max_steps from the token budget, and fixes the run's callbacks,
    logger and checkpoints, so that a run directory is always complete.
    """

    model: PretrainModule
    datamodule: TokenDataModule
    batches: Batches
    run_dir: Path
    #: figures of the finished run; None where there are none (validate, another rank, a stopped run)
    summary: dict[str, Any] | None = None

    def __init__(self, args: list[str], cleanup: ExitStack, fitting: Fitting):
        self._asked = args[0]  # fit or validate
        self._cleanup = cleanup  # run when the command ends, however it does
        self._fitting = fitting
        self._signals = StopSignals()
        prepare_torch()
        set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
        super().__init__(
            PretrainModule,
            args=args,
            parser_class=RunParser,
            parser_kwargs={"prog": "lightning-sv", "parser_mode": "omegaconf+"},
            seed_everything_default=0,
            save_config_callback=None,
            auto_configure_optimizers=False,  # model.optim and model.schedule say it
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Keep the one that is asked for: a parser for another would be built for nothing."""
        return {self._asked: LightningCLI.subcommands()[self._asked]}

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the trainer, the model and the batches, from which the data module is built."""
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        parser.set_defaults({f"trainer.{key}": value for key, value in TRAINER_DEFAULTS.items()})
        parser.add_class_arguments(PretrainModule, "model", skip={"lr"})  # model.optim.lr
        parser.add_class_arguments(Batches, "data")

    def instantiate_classes(self) -> None:
        """Build the data module from the batches, before the trainer."""
        self.config_init = self.parser.instantiate(self.config)
        self.model, self.batches = (self._get(self.config_init, key) for key in ("model", "data"))
        self.datamodule = TokenDataModule.from_batches(self.batches)
        self.trainer = self.instantiate_trainer()

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add what a run has beside model, data and trainer."""
        help_run_dir = (
            "Directory of the run: config, events, checkpoints, summary. Null for "
            "runs/<model>/<strategy>-seed<seed>, with a number where that exists."
        )
        parser.add_argument("--run_dir", type=str | None, default=None, help=help_run_dir)
        help_extend = "Resume under another trainer.max_steps even where the learning rate jumps by it."
        parser.add_argument("--extend", type=bool, nargs="?", const=True, default=False, help=help_extend)
        help_json = "Print the final figures as JSON, the rest on stderr."
        parser.add_argument("--json", type=bool, nargs="?", const=True, default=False, help=help_json)
        for section, callback in CALLBACKS.items():
            parser.add_lightning_class_args(import_object(callback), section)

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Build the trainer, with max_steps from the budget if not set, and choose the run directory."""
        model, data = self.model.settings, self.batches
        given = self._get(self.config_init, "trainer")
        check_trainer_keys(given)
        check_gpu(given["accelerator"])
        kwargs["logger"] = False
        if isinstance(given["strategy"], FullyShardedStrategy):
            kwargs["inference_mode"] = False  # FSDP2 reads version counters, which inference tensors lack
        kwargs["plugins"] = [AtomicCheckpointIO(), *_several(given["plugins"])]
        if self.subcommand == "fit":
            if given["max_steps"] == -1:
                kwargs["max_steps"] = model.steps_for_budget(data.tokens_per_step)
            begin = LambdaCallback(
                setup=lambda trainer, module, stage: check_same_start(self._start),
                on_train_start=lambda trainer, module: self._begin(),
            )
            kwargs["callbacks"] = [begin, *_several(given["callbacks"])]  # before any callback that writes
            self._get(self.config_init, "progress").stream = sys.stderr if self.json else sys.stdout
            self._get(self.config_init, "checkpoint").signals = self._signals
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except ValueError as error:
            raise ConfigError(f"trainer: {error}") from error
        self._cleanup.push(join_ranks(trainer))
        if self.subcommand == "fit":
            name = f"{model.config.name}/{model.label}-seed{self._get(self.config, 'seed_everything')}"
            run_dir, ckpt_path = (self._get(self.config, key) for key in ("run_dir", "ckpt_path"))
            self._choose = partial(choose, name, run_dir, ckpt_path, again=self._again, rank=trainer.global_rank)
            self.run_dir = self._choose()
        return trainer

    def _parse_ckpt_path(self) -> None:
        """Read no settings from a checkpoint: those of the command line count, and loading compares them."""

    def before_instantiate_classes(self) -> None:
        """Find and check the checkpoint, and the callbacks, before anything is built."""
        section = self.config[self.subcommand]
        check_callbacks(section["trainer"]["callbacks"], warn=False)
        path = section["ckpt_path"]
        self._again = path == "last"
        if self._again:
            section["ckpt_path"] = path = last_checkpoint(section["run_dir"])
        if path is not None:
            check_checkpoint(path, checksums=False)  # those are compared where the rank is known

    @property
    def json(self) -> bool:
        """Whether stdout is for the final figures alone."""
        return bool(self._get(self.config, "json"))

    def before_fit(self) -> None:
        """Check corpus and checkpoint before anything is written, claim the directory, say what is to be trained.

        Raises:
            ConfigError: the whole backbone is to be compiled, and sharded
        """
        ckpt_path, extend = (self._get(self.config, key) for key in ("ckpt_path", "extend"))
        trainer, model, data = self.trainer, self.model.settings, self.batches
        init_from, checksums = model.init_from, trainer.local_rank == 0
        if model.compile_how == "model" and isinstance(trainer.strategy, FullyShardedStrategy):
            raise ConfigError("model.compile 'model' does not go with a sharded model; use 'block'.")
        data.check(model.config.vocab_size, checksums=checksums)
        data.share(trainer.world_size)
        data.check_validation(trainer.world_size)
        said: list[str] = []
        self._start = (ckpt_path, 0)
        if ckpt_path is not None:
            checkpoint = check_checkpoint(ckpt_path, checksums=checksums)
            self._start = (ckpt_path, checkpoint["global_step"])
            check_settings(checkpoint, model, data, training=True)
            if not extend:
                check_learning_rate(checkpoint, model, trainer.max_steps)
        elif init_from is not None and is_of_transformers(init_from):
            # 0.2 seconds of imports that other runs do without
            from lightning_sv.interop.hf.load import check_start
            from lightning_sv.interop.hf.tokenizer import check_same_tokenizer

            check_start(model.meta(), init_from)
            check_same_tokenizer(Tokenizer.load(data.corpus.dir), Path(init_from))
            self.model.from_hf = init_from
            said.append(f"starts from the weights of {init_from}, a model of transformers")
        elif init_from is not None:
            start = read_start(init_from, model, data)
            self.model.start_from(start)
            said.append(str(start))
        said += [chosen] if (chosen := self._choose_micro_batch()) else []
        self._accumulate()
        self._cleanup.callback(self._signals.leave)
        if self.trainer.is_global_zero:
            self.run_dir = self._choose(create=True)
            self._cleanup.callback(claim(self.run_dir, ckpt_path, again=self._again).release)
            console = Console(stderr=self.json)
            print_groups(console, self.model, self.trainer.max_steps, self.batches)
            for line in said:
                console.print(line, highlight=False, soft_wrap=True)
        self._get(self.config_init, "checkpoint").path = self.run_dir / LAST
        folder = self.run_dir.absolute()
        # under SLURM Lightning resumes any hpc_ckpt_*.ckpt of its root, which is the working directory if not set
        self.trainer._default_root_dir = str(folder)  # type: ignore[attr-defined]
        ours = RunLogger(folder.parent, name="", version=folder.name, default_hp_metric=False)
        ours.tokens_per_step = self.batches.tokens_per_step
        assert Path(ours.log_dir) == folder, (ours.log_dir, folder)
        self.trainer.loggers = [ours, *_several(self._get(self.config_init, "trainer")["logger"])]
        self._signals.listen(self.trainer)
        self.model.legs.start()

    def _begin(self) -> None:
        """Write what is known before the first step: from here on no checkpoint is refused any more."""
        if not self.trainer.is_global_zero:
            return
        config = self.config[self.subcommand].clone()
        if config["ckpt_path"] is None:
            clear(self.run_dir)
        (self.run_dir / SUMMARY).unlink(missing_ok=True)  # of fewer steps: the run is not complete any more
        tokenizer = Tokenizer.load(self.batches.corpus.dir)  # `generate` needs the run alone
        with whole(self.run_dir / tokenizer.filename) as file:
            file.write_bytes(tokenizer.to_bytes())
        write_parameters(self.run_dir, self.model)
        if not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            config["run_dir"], config["ckpt_path"], config["extend"] = None, None, False  # of this start alone
            for key in (key for key in INPUTS if config[key] is not None):  # the run may be resumed from elsewhere
                config[key] = str(Path(config[key]).absolute())
            write_atomically(self.run_dir / CONFIG, self._parser(self.subcommand).dump(config, skip_none=False))
        for logger in self.trainer.loggers:
            if isinstance(logger, RunLogger):
                logger.opened = True
            logger.log_hyperparams(hyperparameters(self.trainer, self.model, self.batches))

    def _accumulate(self) -> None:
        """Set accumulation and the validation interval, because the number of devices is known only now."""
        accumulate = self.batches.share(self.trainer.world_size).accumulate
        self.trainer.accumulate_grad_batches = accumulate
        every = math.ceil(self.trainer.max_steps / self.batches.validations)
        self.trainer.val_check_interval = every * accumulate  # type: ignore[attr-defined]

    def _choose_micro_batch(self) -> str | None:
        trainer, keys = self.trainer, self._get(self.config, "trainer").as_dict()
        device, devices = trainer.strategy.root_device, trainer.world_size
        return choose_micro_batch(self.model.settings, self.batches, keys, device, devices, self._fitting)

    def after_fit(self) -> None:
        """Write and show the summary of a run that reached its last step."""
        trainer = self.trainer
        complete = trainer.global_step >= trainer.max_steps and not trainer.fast_dev_run  # type: ignore[attr-defined]
        if not complete:
            return
        if "val/loss" not in trainer.callback_metrics:  # resumed at the last step
            # All devices validate, or none: only the first knows the run's directory.
            if trainer.strategy.broadcast(is_complete(self.run_dir)):
                if trainer.is_global_zero:
                    log.info("nothing to do: the checkpoint is at step %d, the last", trainer.global_step)
                    self.summary = read_summary(self.run_dir)  # of a run that ended before it was shown, perhaps
                return
            trainer.validate(self.model, datamodule=self.datamodule, verbose=False)
            self._begin()
        if not trainer.is_global_zero:
            return
        summary = summarize(trainer, self.model, self.batches)
        for logger in trainer.loggers:
            logger.finalize("success")
        write_summary(self.run_dir, summary)
        self.summary = summary

    def before_validate(self) -> None:
        """Refuse to report the loss of an untrained model, or on a damaged corpus."""
        path = self._get(self.config, "ckpt_path")
        if not path:
            raise ConfigError(f"validate needs a checkpoint; add --ckpt_path RUN/{LAST}.")
        check_checkpoint(path, checksums=self.trainer.local_rank == 0)
        self.batches.check(self.model.settings.config.vocab_size, checksums=self.trainer.local_rank == 0)
        self._choose_micro_batch()

    def after_validate(self) -> None:
        """Show the validation loss."""
        loss = self.trainer.callback_metrics["val/loss"]
        if self.trainer.is_global_zero:
            corpus = self.batches.manifest.corpus_hash
            figures = {"val_loss": float(loss), "val_perplexity": float(loss.exp()), "corpus_hash": corpus}
            text = f"val/loss {figures['val_loss']:.4f} nats/token, perplexity {figures['val_perplexity']:.2f}"
            text += f", of corpus {corpus[:12]} in {self.batches.corpus.dir}"
            print(json.dumps(figures) if self.json else text)


def _several(value: Any) -> list[Any]:
    """Read a Trainer argument that is nothing, a switch, one thing or a list of them."""
    if value is None or isinstance(value, bool):
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
