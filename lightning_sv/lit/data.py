"""LightningDataModule: token sequences of a prepared corpus, in an order determined by the seed."""

import math
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Self

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, distributed
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_sv.callbacks.run_state import is_at_end, settings_of
from lightning_sv.corpus import CorpusConfig, Manifest, TokenLoader, check_corpus, local_folder, open_split
from lightning_sv.corpus.sampler import Batches, DeviceSampler, limited
from lightning_sv.errors import ConfigError, expect
from lightning_sv.lit.checkpoint.compat import recorded_settings
from lightning_sv.lit.distributed import check_same_on_all_ranks
from lightning_sv.lit.fsdp import FullyShardedStrategy
from lightning_sv.lit.module import PretrainModule
from lightning_sv.runs.provenance import commit
from lightning_sv.settings.data import DataConfig

#: Minimum number of tokens per validation batch, rounded to sequences.
VALIDATION_TOKENS = 2048


class TokenDataModule(L.LightningDataModule):
    """Yield (batch_size, seq_len + 1) token ids of a prepared corpus, for any Trainer.

    An optimizer step reads batch_size x accumulate_grad_batches x devices sequences; their order depends only on the
    seed and on that number. Checkpoints contain the loader's position, so that a run resumes exactly, also on a
    different number of devices. `test` and `predict` read the validation split.

    Args:
        corpus: folder written by `lightning-sv prepare`, its address in an object store, or its `CorpusConfig`
        seq_len: number of predicted tokens per sequence
        batch_size: sequences per forward pass on one device
        global_batch: sequences per optimizer step over all devices, for a check; None to use the Trainer's
        num_workers: loader processes per device; 0 to read in the training process
        val_sequences: maximum number of validation sequences, spread evenly over the split; None for all
        seed: seed of the order; None for that of seed_everything, or 0 without it
        full_last_validation: if True, the last validation of a fit reads the whole split, and so do `validate` and
            `test`; a fit that only `max_time` or a callback ends has no last validation

    Attributes:
        batches: corpus, sequence length and batch; `setup` sets the global batch

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
        full_last_validation: bool = True,
    ):
        super().__init__()
        expect(batch_size > 0, "batch_size", batch_size, "at least 1.")
        if isinstance(corpus, dict):  # of load_from_checkpoint
            corpus = CorpusConfig(**corpus)
        if not isinstance(corpus, CorpusConfig):
            corpus = CorpusConfig(dir=str(corpus), tokenizer=Manifest.load(local_folder(corpus)).tokenizer)
        self.batches = DataConfig(
            corpus, seq_len, batch_size if global_batch is None else global_batch, batch_size,
            num_workers=num_workers, val_sequences=val_sequences, full_last_validation=full_last_validation, seed=seed,
        )  # fmt: skip
        self._is_fixed = global_batch is not None
        self._save_arguments()
        self._share = self.batches.share(1)
        self._loader: TokenLoader | None = None  # of the last fit, or the last one made
        self._position: dict[str, Any] | None = None  # of the checkpoint, for the first loader of the fit
        #: values that all ranks must share in addition to those of `_shared_values`; the command line sets its config
        self.shared: dict[str, Any] = {}

    @classmethod
    def from_batches(cls, batches: DataConfig) -> Self:
        """Create the module for the command line, which sets the global batch and later the micro-batch."""
        module = cls(batches.corpus, batches.seq_len, batches.global_batch, batches.global_batch)
        module.read(batches)
        return module

    def read(self, batches: DataConfig) -> None:
        """Read these batches from the next loader on."""
        self.batches = batches

    def _save_arguments(self) -> None:
        """Save the arguments as plain values, for load_from_checkpoint."""
        batches = self.batches
        arguments = {
            "corpus": asdict(batches.corpus),
            "seq_len": batches.seq_len,
            "batch_size": self.batch_size,
            "global_batch": batches.global_batch if self._is_fixed else None,
            "num_workers": batches.num_workers,
            "val_sequences": batches.val_sequences,
            "full_last_validation": batches.full_last_validation,
            "seed": batches.seed,
        }
        # Not for the logger: the module has a seed too, and Lightning refuses two values of one name.
        self.save_hyperparameters(arguments, logger=False)

    @property
    def batch_size(self) -> int:
        """Sequences per forward pass on one device."""
        return self.batches.micro_batch or self.batches.global_batch

    def setup(self, stage: str) -> None:
        """Set this device's part of a step from the Trainer's devices and accumulation.

        Without a Trainer the processes of torch.distributed divide a step; call this after `fabric.launch()`.

        Raises:
            ConfigError: the corpus does not fit the model, accumulation does not match the global batch, or ranks have
            different settings or data
        """
        trainer = self.trainer
        if stage == "fit":
            self._loader = self._position = None
        if trainer is None:
            self._split_without_trainer()
            return
        check_same_on_all_ranks(self.shared | self._shared_values(trainer))
        self._check_corpus(trainer)
        self._split_over_devices(trainer, stage)
        self._save_arguments()  # the command line has chosen the micro-batch by now
        self.batches.check_validation(trainer.world_size)
        self._warn_of_uneven_validation(trainer, stage)

    def _split_without_trainer(self) -> None:
        """Split the batch over the processes of torch.distributed, as in a loop with Fabric."""
        devices = self._devices
        if not self._is_fixed:
            self.batches = replace(self.batches, global_batch=self.batch_size * devices)
        rank = distributed.get_rank() if devices > 1 else 0
        self._share = self.batches.share(devices, rank)

    @property
    def _devices(self) -> int:
        """Number of devices of the Trainer, or of torch.distributed if there is none."""
        if self.trainer is not None:
            return self.trainer.world_size
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_world_size()
        return 1

    def _check_corpus(self, trainer: L.Trainer) -> None:
        """Check that the corpus fits the sequences, and the model if it is ours; the command line checks the hashes."""
        batches = self.batches
        settings = settings_of(trainer.lightning_module)
        if settings is None:
            check_corpus(batches.manifest, batches.folder, seq_len=batches.seq_len, checksums=False)
            return
        batches.check(settings.backbone.vocab_size, checksums=False)

    def _split_over_devices(self, trainer: L.Trainer, stage: str) -> None:
        """Set this device's part of a step from the Trainer's devices and accumulation."""
        accumulate = int(trainer.accumulate_grad_batches)
        devices = trainer.world_size
        if not self._is_fixed:
            self.batches = replace(self.batches, global_batch=self.batch_size * accumulate * devices)
        batches = self.batches
        share = batches.share(devices, trainer.global_rank)
        if stage == "fit" and share.accumulate != accumulate:
            why = f"global_batch is {batches.global_batch} on {devices} devices of batch_size {share.micro_batch}."
            wanted = f"{share.accumulate}, because {why}"
            raise ConfigError(f"trainer.accumulate_grad_batches is {accumulate}; expected {wanted}")
        self._share = share

    def _warn_of_uneven_validation(self, trainer: L.Trainer, stage: str) -> None:
        """Warn if the user's own step averages over devices that read unequal numbers of sequences."""
        devices = trainer.world_size
        uneven = self._uneven_validation(devices)
        if uneven is None or stage == "predict":
            return
        step = "validation_step"
        limit = trainer.limit_val_batches
        if stage == "test":
            step = "test_step"
            limit = trainer.limit_test_batches
        if limit and _has_own_step(trainer.lightning_module, step):
            rank_zero_warn(
                f"{uneven} validation sequences are not a multiple of {devices} devices. Lightning rounds the mean "
                f"number of sequences per device, so a loss that your {step} logs with sync_dist=True is too high. "
                "Choose a val_sequences that is a multiple, and full_last_validation=False."
            )

    def _uneven_validation(self, devices: int) -> int | None:
        """Return the number of sequences of a validation that is no multiple of `devices`; None if all are."""
        for n_sequences in (self.batches.validation_sequences, self.batches.last_validation_sequences):
            if n_sequences % devices:
                return n_sequences
        return None

    def _shared_values(self, trainer: L.Trainer) -> dict[str, Any]:
        """Return what determines a run in any Trainer, as plain values."""
        settings = settings_of(trainer.lightning_module)
        data = self.batches
        return {
            type(trainer.lightning_module).__name__: settings and recorded_settings(settings, None),
            "Trainer": {
                "max_steps": trainer.max_steps,
                "accumulate_grad_batches": trainer.accumulate_grad_batches,
                "gradient_clip_val": trainer.gradient_clip_val,
                "precision": str(trainer.precision),
                "strategy": type(trainer.strategy).__name__,
            },
            "TokenDataModule": {
                "seq_len": data.seq_len,
                "micro_batch": data.micro_batch,
                "val_sequences": data.val_sequences,
                "seed": self._seed,
            },
            "the hash of the corpus": data.manifest.corpus_hash,
            "the hash of the tokenizer": data.manifest.tokenizer_sha256,
            "the commit of lightning_sv": commit(),
            "the version of torch": torch.__version__,
            "the version of lightning": L.__version__,
        }

    @property
    def _seed(self) -> int:
        """Return the seed of the order: not torch's, which differs between processes until one is set."""
        return int(os.environ.get("PL_GLOBAL_SEED", "0")) if self.batches.seed is None else self.batches.seed

    @property
    def _on_cuda(self) -> bool:
        """Return True if batches are copied to a GPU, for which page-locked memory is asynchronous."""
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"

    def train_dataloader(self) -> TokenLoader:
        """Return shuffled sequences; the loader's state_dict is the exact position in the corpus.

        With the Trainer's overfit_batches, every epoch has the same order. A resumed fit continues at its checkpoint.

        Raises:
            ConfigError: `setup` was not called on these devices
        """
        batches, trainer = self.batches, self.trainer
        if self._share.ranks != self._devices:
            hint = "Call super().setup(stage) in a subclass, or setup('fit') after fabric.launch()."
            raise ConfigError(f"setup of TokenDataModule is not called; expected a call. {hint}")
        repeat = trainer is not None and trainer.overfit_batches > 0  # type: ignore[attr-defined]
        loader = TokenLoader(
            open_split(batches.folder, "train", seq_len=batches.seq_len),
            self._share,
            seed=self._seed,
            num_workers=batches.num_workers,
            pin_memory=self._on_cuda,
            # reload_dataloaders_every_n_epochs calls this again
            epoch=0 if trainer is None or repeat else trainer.current_epoch,
            repeat=repeat,
            limit=1.0 if trainer is None else trainer.limit_train_batches,
        )
        self._loader = loader
        if trainer is not None:
            loader.unfinished = partial(_unfinished, trainer)
            if self._position is not None and trainer.train_dataloader is None:
                loader.load_state_dict(self._position)
        return loader

    def _read_loader(self) -> TokenLoader | None:
        """Return the loader that the Trainer reads, if it is ours: the user may have made others to look at a batch."""
        found = None if self.trainer is None else self.trainer.train_dataloader
        return next((loader for loader in tree_leaves(found) if isinstance(loader, TokenLoader)), self._loader)

    def teardown(self, stage: str) -> None:
        """Keep the loader of a fit: later stages remove it from the Trainer, whose checkpoints have its position."""
        self._loader = self._read_loader()

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position, which Lightning restores only inside an epoch and without max_epochs."""
        loader = self._read_loader()
        return self._position or {} if loader is None else loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue a fit from this position."""
        if self.trainer is None or self.trainer.state.fn != "fit" or state_dict["epoch"] < 0:
            return
        self._position, loader = state_dict, self._read_loader()
        if loader is not None:
            loader.load_state_dict(state_dict)

    def val_dataloader(self) -> "DataLoader[Tensor] | ValidationLoader":
        """Return `val_sequences` sequences, evenly spread over the validation split, always the same.

        With `full_last_validation` a Trainer reads the whole split at the end of a fit, and outside of a fit.
        """
        trainer, settings = self.trainer, self.batches
        usual, last = settings.validation_sequences, settings.last_validation_sequences
        if trainer is None or trainer.state.stage is None or usual == last:
            return self._evaluation_loader(usual)
        if trainer.state.fn != "fit":
            return self._evaluation_loader(last)
        loaders = self._evaluation_loader(usual), self._evaluation_loader(last)
        return ValidationLoader(*loaders, trainer)

    def _evaluation_loader(self, n_sequences: int) -> "DataLoader[Tensor]":
        """Return this device's part of validation sequences.

        Devices read different sequences in the same number of batches, because sharded forward passes must match.
        Batch sizes differ by one at most, because the compiler specializes on each.
        """
        settings = self.batches
        sequences, numbers = settings.validation_split(n_sequences)
        # Evaluation saves no graph, so larger batches fit.
        size = max(self._share.micro_batch, VALIDATION_TOKENS // settings.seq_len)
        batches = math.ceil(len(numbers) // self._share.ranks / size)
        mine = np.array(numbers[self._share.rank :: self._share.ranks])
        numbers_per_batch = [part.tolist() for part in np.array_split(mine, batches)]
        return DataLoader(
            Batches(sequences),
            batch_size=None,  # the sampler yields batches
            sampler=DeviceSampler(numbers_per_batch),
            generator=torch.Generator(),
            pin_memory=self._on_cuda,
        )

    test_dataloader = val_dataloader

    def predict_dataloader(self) -> "DataLoader[Tensor]":
        """Return this device's part of `val_dataloader`, in batches of equal size, as Lightning's indices require."""
        sequences, numbers = self.batches.validation_split(self.batches.validation_sequences)
        ranks, size = self._share.ranks, self._share.micro_batch
        # A sharded model needs the same number of batches on all devices; one sequence more must not be a new batch.
        if self.trainer is not None and isinstance(self.trainer.strategy, FullyShardedStrategy):
            while len(numbers) % ranks and len(numbers) // ranks % size == 0:
                size += 1
        mine = numbers[self._share.rank :: ranks]
        return DataLoader(sequences, batch_size=size, sampler=DeviceSampler(mine))


class ValidationLoader:
    """Read some validation batches, and all of them after the last step of a fit.

    Lightning asks for the length once per fit and stops there. So the length is that of the last validation, and the
    others end earlier. Lightning's progress bar shows a part of its length in these.

    Args:
        usual: batches of a validation before the last
        last: batches of the last validation
        trainer: trainer of the fit, whose fraction limit_val_batches limits both
    """

    def __init__(self, usual: "DataLoader[Tensor]", last: "DataLoader[Tensor]", trainer: L.Trainer):
        self.usual, self.last, self.trainer = usual, last, trainer

    def __len__(self) -> int:
        return len(self.last)

    def __iter__(self) -> Iterator[Tensor]:
        if not self.trainer.sanity_checking and is_at_end(self.trainer):
            return iter(self.last)
        batches = limited(len(self.usual), self.trainer.limit_val_batches)
        return islice(self.usual, max(1, batches))


def _has_own_step(module: L.LightningModule, step: str) -> bool:
    """Return True if a module has a step that is not that of PretrainModule."""
    if not is_overridden(step, module):
        return False
    return getattr(type(module), step) is not getattr(PretrainModule, step)


def _unfinished(trainer: L.Trainer) -> int:
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return int(batches.ready - batches.processed)
