"""Steps that `fit` and `validate` share, with the objects that the command line has built."""

from typing import Any

import lightning as L
from jsonargparse import Namespace

from lightning_sv.errors import ConfigError
from lightning_sv.lit.checkpoint.resumed import StartingPoint
from lightning_sv.lit.data import TokenDataModule
from lightning_sv.lit.module import PretrainModule
from lightning_sv.plan.micro_batch import choose_micro_batch
from lightning_sv.runs.checkpoint import check_checkpoint
from lightning_sv.settings.data import DataConfig

#: keys that may differ between the ranks of a run
_OF_A_RANK = ("config", "run_dir", "json", "data.corpus.dir", "data.num_workers")


class CommandRun:
    """One run of `fit` or `validate`, from built objects to results.

    Args:
        cli: `PretrainCLI` with the built objects; `set_micro_batch` completes its `data`
    """

    def __init__(self, cli: Any):
        self.cli = cli
        self.config: Namespace = cli.config
        self.start: StartingPoint = cli.starting_point
        self.model: PretrainModule = cli.model
        self.trainer: L.Trainer = cli.trainer

    @property
    def data(self) -> DataConfig:
        """Section `data` of the config."""
        data: DataConfig = self.cli.data
        return data

    def check_corpus(self) -> None:
        """Check that the corpus fits the model, with checksums once per node."""
        is_first = self.trainer.local_rank == 0
        self.data.check(self.model.settings.backbone.vocab_size, checksums=is_first)

    def read_checkpoint(self, path: str) -> dict[str, Any]:
        """Return the content of a checkpoint, after a check with checksums once per node."""
        return check_checkpoint(path, checksums=self.trainer.local_rank == 0)

    def set_micro_batch(self) -> str | None:
        """Set the micro-batch and build the data module; return a sentence if it was chosen."""
        trainer = self.trainer
        keys = self.config["trainer"].as_dict()
        device = trainer.strategy.root_device
        self.cli.data, choice = choose_micro_batch(
            self.model.settings, self.data, keys, device, trainer.world_size
        )
        self.cli.datamodule = TokenDataModule.from_settings(self.data, self._shared_values())
        return choice

    def _shared_values(self) -> dict[str, Any]:
        """Return the config and the checkpoint, which all ranks must share."""
        config = self.config.clone()
        for key in _OF_A_RANK:
            config.pop(key, None)
        return config.as_dict() | {"ckpt_path": str(self.start)}

    def check_validated(self) -> None:
        """Check that a validation has logged the loss, which a subclass of the module may not."""
        if "val/loss" not in self.trainer.callback_metrics:
            expected = "self.log('val/loss', ...) in validation_step"
            raise ConfigError(f"val/loss is not logged by the model; expected {expected}.")


def several(value: Any) -> list[Any]:
    """Return the objects of a Trainer argument that is None, a switch, one object or a list."""
    if value is None or isinstance(value, bool):
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
