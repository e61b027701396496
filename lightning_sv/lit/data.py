"""LightningDataModule: token sequences of a prepared corpus, in an order determined by the seed."""

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import lightning as L
from torch import Tensor, distributed
from torch.utils.data import DataLoader

from lightning_sv.callbacks.run_state import settings_of
from lightning_sv.corpus import CorpusConfig, Epochs, TokenLoader, check_corpus, open_split
from lightning_sv.errors import ConfigError, expect, expect_number
from lightning_sv.lit.build import corpus_from
from lightning_sv.lit.evaluation import ValidationLoader, validation_loader
from lightning_sv.lit.position import CorpusPosition, epochs_of
from lightning_sv.lit.same_run import check_same_on_all_ranks, run_values
from lightning_sv.settings.data import DataConfig


class TokenDataModule(L.LightningDataModule):
    """Yield (batch_size, seq_len + 1) token ids of a prepared corpus, for any Trainer.

    An optimizer step reads batch_size x accumulate_grad_batches x devices sequences; their order
    depends only on the seed and on that number. Checkpoints contain the loader's position, so that
    a run resumes exactly, also on a different number of devices. `test` reads the validation split.

    Args:
        corpus: folder written by `lightning-sv prepare`, its address in an object store, or its
            `CorpusConfig`
        seq_len: number of predicted tokens per sequence
        batch_size: sequences per forward pass on one device
        global_batch: sequences per optimizer step over all devices, for a check; None to use the
            Trainer's
        num_workers: loader processes per device; 0 to read in the training process
        val_sequences: maximum number of validation sequences, spread evenly over the split; None
            for all
        seed: seed of the order; None for that of seed_everything, or 0 without it
        full_last_validation: if True, the last validation of a fit reads the whole split, and so do
            `validate` and `test`, as on the command line. ModelCheckpoint and EarlyStopping then
            compare losses of different data. A fit that only `max_time` or a callback ends has no
            last validation, nor has one without a validation after its last step: Lightning counts
            `val_check_interval` in batches, and begins again in each epoch

    Attributes:
        settings: corpus, sequence length and batch; `setup` sets the global batch

    Raises:
        ConfigError: a number out of range, or no corpus in the folder
    """

    def __init__(
        self,
        corpus: CorpusConfig | str | Path,
        seq_len: int,
        batch_size: int,
        global_batch: int | None = None,
        num_workers: int = 0,
        val_sequences: int | None = 512,
        seed: int | None = None,
        full_last_validation: bool = False,
    ):
        super().__init__()
        expect_number("batch_size", batch_size, int)
        expect(batch_size > 0, "batch_size", batch_size, "at least 1.")
        self.settings = DataConfig(
            corpus_from(corpus),
            seq_len,
            batch_size if global_batch is None else global_batch,
            batch_size,
            num_workers=num_workers,
            val_sequences=val_sequences,
            full_last_validation=full_last_validation,
            seed=seed,
        )
        self._global_batch = global_batch
        self._save_arguments()
        self._share = self.settings.share(1)
        self._position = CorpusPosition()
        self._shared: Mapping[str, Any] = {}

    @classmethod
    def from_settings(cls, settings: DataConfig, shared: Mapping[str, Any]) -> Self:
        """Create the module of the command line.

        Args:
            settings: corpus, sequence length and batch
            shared: values that all ranks must share in addition to `run_values`
        """
        module = cls(
            settings.corpus,
            settings.seq_len,
            settings.micro_batch or settings.global_batch,
            settings.global_batch,
            settings.num_workers,
            settings.val_sequences,
            settings.seed,
            settings.full_last_validation,
        )
        module.settings = settings
        module._shared = shared
        return module

    def _save_arguments(self) -> None:
        """Save the arguments as plain values, for load_from_checkpoint."""
        settings = self.settings
        arguments = {
            "corpus": asdict(settings.corpus),
            "seq_len": settings.seq_len,
            "batch_size": self.batch_size,
            "global_batch": self._global_batch,
            "num_workers": settings.num_workers,
            "val_sequences": settings.val_sequences,
            "full_last_validation": settings.full_last_validation,
            "seed": settings.seed,
        }
        # Not for the logger: the module has a seed too, and Lightning refuses two of one name.
        self.save_hyperparameters(arguments, logger=False)

    @property
    def batch_size(self) -> int:
        """Sequences per forward pass on one device."""
        return self.settings.micro_batch or self.settings.global_batch

    # This device's part

    def setup(self, stage: str) -> None:
        """Set this device's part of a step from the Trainer's devices and accumulation.

        Without a Trainer the processes of torch.distributed divide a step; call this after
        `fabric.launch()`.

        Raises:
            ConfigError: the corpus does not fit the model, accumulation does not match the global
                batch, or ranks have different settings or data
        """
        self._save_arguments()  # again, because a subclass may have saved its own for the logger
        trainer = self.trainer
        if stage == "fit":
            self._position = CorpusPosition()
        if trainer is None:
            rank = distributed.get_rank() if self._devices > 1 else 0
            self._set_share(accumulate=1, rank=rank)
            return
        shared = run_values(trainer, self.settings, self._seed)
        check_same_on_all_ranks({**self._shared, **shared})
        self._check_corpus(trainer)
        accumulate = int(trainer.accumulate_grad_batches)
        self._set_share(accumulate, trainer.global_rank)
        if stage == "fit":
            self._check_accumulation(accumulate)
        self.settings.check_validation(self._devices)

    def _set_share(self, accumulate: int, rank: int) -> None:
        """Set this device's part; without a global_batch a step is what the Trainer accumulates."""
        if self._global_batch is None:
            sequences = self.batch_size * accumulate * self._devices
            self.settings = replace(self.settings, global_batch=sequences)
        self._share = self.settings.share(self._devices, rank)

    def _check_accumulation(self, accumulate: int) -> None:
        share = self._share
        if share.accumulate != accumulate:
            batch = f"a global_batch of {share.global_batch}"
            parts = f"{share.ranks} devices with a batch_size of {share.micro_batch}"
            expected = f"{share.accumulate}, for {batch} on {parts}"
            found = f"trainer.accumulate_grad_batches is {accumulate}"
            raise ConfigError(f"{found}; expected {expected}.")

    @property
    def _devices(self) -> int:
        """Number of devices of the Trainer, or of torch.distributed if there is none."""
        if self.trainer is not None:
            return self.trainer.world_size
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_world_size()
        return 1

    def _check_corpus(self, trainer: L.Trainer) -> None:
        """Check that the corpus fits the sequences, and the model if it is ours."""
        data = self.settings
        model = settings_of(trainer.lightning_module)
        if model is not None:
            data.check(model.backbone.vocab_size, checksums=False)
            return
        check_corpus(data.manifest, data.folder, seq_len=data.seq_len, checksums=False)

    @property
    def _seed(self) -> int:
        """Seed of the order; not torch's, which differs between processes until one is set."""
        if self.settings.seed is not None:
            return self.settings.seed
        return int(os.environ.get("PL_GLOBAL_SEED", "0"))

    @property
    def _on_cuda(self) -> bool:
        """True if batches are copied to a GPU, for which page-locked memory is asynchronous."""
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"

    # Loaders

    def train_dataloader(self) -> TokenLoader:
        """Return shuffled sequences; the loader's state_dict is the exact position in the corpus.

        With the Trainer's overfit_batches, every epoch has the same order. A resumed fit continues
        at its checkpoint.

        Raises:
            ConfigError: `setup` was not called on these devices
        """
        if self._share.ranks != self._devices:
            hint = "Call super().setup(stage) in a subclass, or setup('fit') after fabric.launch()."
            raise ConfigError(f"setup of TokenDataModule is not called; expected a call. {hint}")
        epochs = Epochs() if self.trainer is None else epochs_of(self.trainer)
        loader = TokenLoader(
            open_split(self.settings.folder, "train", seq_len=self.settings.seq_len),
            self._share,
            seed=self._seed,
            num_workers=self.settings.num_workers,
            pin_memory=self._on_cuda,
            epochs=epochs,
        )
        return self._position.start(loader, self.trainer)

    def val_dataloader(self) -> "DataLoader[Tensor] | ValidationLoader":
        """Return `val_sequences` sequences, evenly spread over the split, always the same.

        With `full_last_validation` a Trainer reads the whole split at the end of a fit, and outside
        of a fit.
        """
        pin_memory = self._on_cuda
        return validation_loader(self.settings, self._share, self.trainer, pin_memory=pin_memory)

    test_dataloader = val_dataloader

    # The position in the corpus, which Lightning itself restores inside an epoch only

    def teardown(self, stage: str) -> None:
        """Keep the position of a fit for later checkpoints."""
        self._position.keep(self.trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return self._position.state(self.trainer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue a fit from this position."""
        self._position.restore(state_dict, self.trainer)
