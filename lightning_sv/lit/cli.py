"""`lightning-sv fit` and `validate`: LightningCLI with this project's run directory and checks."""

import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
from jsonargparse import set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_sv.callbacks import BranchNorms, RunProgress, Scalars
from lightning_sv.lit.checkpoint import AtomicCheckpointIO, LastCheckpoint
from lightning_sv.lit.data import ShardDataModule
from lightning_sv.lit.module import PretrainModule


class Parser(LightningArgumentParser):
    """An argument parser whose errors are one sentence and exit with 2."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # type: ignore[override]
        """Raise ValueError with the message, and the nearest right name for a misspelled key."""
        text = re.sub(r"\s+", " ", f"{ex or message}").strip()
        text = re.sub(r"^(Parser key|Validation failed:)\s*", "", text)
        unknown = re.search(
            r"(?:Key|Option|Unrecognized arguments?|No action for key|unrecognized arguments?)[:\s]+"
            r"[\"'`]?-{0,2}(?P<key>[\w.]+)",
            text,
        )
        hint = ""
        if unknown:
            keys = self.keys()
            near = get_close_matches(unknown["key"], keys, n=1, cutoff=0.6)
            if not near:
                leaf = unknown["key"].rpartition(".")[2]
                near = [k for k in keys if k.rpartition(".")[2] in get_close_matches(leaf, [k.rpartition(".")[2] for k in keys], n=1)][:1]
            hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{text.rstrip('.')}.{hint}") from ex

    def keys(self) -> list[str]:
        """Return every key that a config may set."""
        return [action.dest for action in self._actions if action.dest not in ("help", "==SUPPRESS==")]


class SaveRunConfig(SaveConfigCallback):
    """Writes the resolved config to <run_dir>/config.yaml; a resumed run overwrites its own."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Save once, when training starts."""
        if stage == "fit":
            super().setup(trainer, pl_module, stage)


class PretrainCLI(LightningCLI):
    """LightningCLI for `PretrainModule` and `ShardDataModule`.

    Adds `run_dir`, derives trainer.max_steps from the token budget, and fixes the run's callbacks,
    logger and checkpoints, so that a run directory is always complete.
    """

    run_dir: Path

    def __init__(self, args: list[str]):
        set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
        super().__init__(
            PretrainModule,
            ShardDataModule,
            args=args,
            parser_class=Parser,
            parser_kwargs={"parser_mode": "omegaconf+"},
            seed_everything_default=0,
            save_config_callback=SaveRunConfig,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={
                "gradient_clip_val": 1.0,
                "num_sanity_val_steps": 0,
                "check_val_every_n_epoch": None,
                "enable_model_summary": False,
            },
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Keep fit and validate."""
        every = LightningCLI.subcommands()
        return {name: every[name] for name in ("fit", "validate")}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add what a run has beside model, data and trainer."""
        parser.add_argument(
            "--run_dir",
            type=str | None,
            default=None,
            help="Directory of the run: config, events, checkpoints, summary. Null for "
            "runs/<model>/<strategy>-seed<seed>, with a number where that exists.",
        )
        parser.add_lightning_class_args(Scalars, "scalars")
        parser.add_lightning_class_args(BranchNorms, "branch_norms")
        parser.add_lightning_class_args(LastCheckpoint, "checkpoint")
        parser.add_lightning_class_args(RunProgress, "progress")

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Build the trainer of the run directory, with max_steps from the budget if not set."""
        model, data = self.model, self.datamodule
        assert isinstance(model, PretrainModule) and isinstance(data, ShardDataModule)
        kwargs["logger"] = False
        if self.subcommand == "fit":
            if self._get(self.config, "trainer")["max_steps"] == -1:
                kwargs["max_steps"] = model.steps_for_budget(data.tokens_per_step)
            self.run_dir = self._new_run_dir(model)
            kwargs["plugins"] = [AtomicCheckpointIO()]
            kwargs["logger"] = TensorBoardLogger(
                self.run_dir.parent, name="", version=self.run_dir.name, default_hp_metric=False
            )
            self._get(self.config_init, "checkpoint").path = self.run_dir / "checkpoints" / "last.ckpt"
        return super().instantiate_trainer(**kwargs)

    def _new_run_dir(self, model: PretrainModule) -> Path:
        given = self._get(self.config, "run_dir")
        resumes = self._get(self.config, "ckpt_path")
        if given is None and resumes:
            return Path(resumes).resolve().parent.parent
        if given is None:
            seed = self._get(self.config, "seed_everything")
            base = Path("runs") / model.config.name / f"{model.label}-seed{seed}"
            path, number = base, 1
            while path.exists():
                number += 1
                path = base.with_name(f"{base.name}-{number}")
            return path
        path = Path(given)
        if (path / "config.yaml").exists() and not resumes:
            raise ValueError(
                f"run_dir {path} already holds a run; choose another, delete it, or resume it with "
                f"--ckpt_path {path / 'checkpoints' / 'last.ckpt'}."
            )
        return path
