"""The LightningDataModule: blocks of tokens from a prepared corpus, in an order fixed by the seed."""

import math
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from lightning_sv.corpus import CorpusConfig, Manifest, TokenDataset, TokenLoader, open_split


class ShardDataModule(L.LightningDataModule):
    """Streams (micro_batch, seq_len + 1) blocks of token ids from litdata shards.

    The global batch is reached by gradient accumulation: each optimizer step sees `global_batch`
    sequences on any number of devices.

    Args:
        corpus: the corpus; `lightning-sv prepare` makes it, training reads corpus.dir.
        seq_len: tokens a sequence predicts.
        global_batch: sequences an optimizer step, over all devices.
        micro_batch: sequences a device processes at once; null for global_batch / devices.
        num_workers: loader processes a device; 0 reads in the training process.
        validations: validations in a run, evenly spaced, the last at the end.
        val_sequences: sequences each validation reads, spread evenly over the split and always the same;
            null for the whole split.
        seed: of the order of the blocks; null for seed_everything's.
    """

    def __init__(
        self,
        corpus: CorpusConfig,
        seq_len: int,
        global_batch: int,
        micro_batch: int | None = None,
        num_workers: int = 0,
        validations: int = 20,
        val_sequences: int | None = None,
        seed: int | None = None,
    ):
        super().__init__()
        least = {
            "seq_len": 1,
            "global_batch": 1,
            "micro_batch": 1,
            "validations": 1,
            "val_sequences": 1,
            "num_workers": 0,
        }
        for key, minimum in least.items():
            value = locals()[key]
            if value is not None and value < minimum:
                raise ValueError(f"data.{key} is {value}; it must be at least {minimum}.")
        self.corpus, self.seq_len, self.global_batch = corpus, seq_len, global_batch
        self.micro_batch, self.num_workers = micro_batch, num_workers
        self.validations, self.val_sequences, self.seed = validations, val_sequences, seed
        self._manifest: Manifest | None = None

    @property
    def tokens_per_step(self) -> int:
        """Tokens an optimizer step sees, over all devices."""
        return self.global_batch * self.seq_len

    @property
    def manifest(self) -> Manifest:
        """What `lightning-sv prepare` recorded of the corpus."""
        if self._manifest is None:
            self._manifest = Manifest.load(self.corpus.dir)
        return self._manifest

    @property
    def eot(self) -> int:
        """Id of the end-of-text token between documents."""
        return self.manifest.eot

    def check(self, vocab_size: int) -> None:
        """Refuse a corpus that cannot be trained on, before any step.

        Raises:
            ValueError: names the file or key, and what to do.
        """
        self.manifest.verify(
            Path(self.corpus.dir),
            vocab_size=vocab_size,
            seq_len=self.seq_len,
            tokenizer=self.corpus.tokenizer,
        )

    def micro_batches(self, devices: int) -> tuple[int, int]:
        """Return (sequences a device processes at once, micro-batches an optimizer step).

        Raises:
            ValueError: the global batch cannot be shared evenly.
        """
        per_device, rest = divmod(self.global_batch, devices)
        if rest:
            raise ValueError(
                f"data.global_batch {self.global_batch} cannot be shared evenly by {devices} devices; "
                "change one of them."
            )
        micro = self.micro_batch or per_device
        if per_device % micro:
            raise ValueError(
                f"data.micro_batch {micro} does not divide the {per_device} sequences a device has of "
                f"data.global_batch {self.global_batch} on {devices} devices; change one of them."
            )
        return micro, per_device // micro

    def setup(self, stage: str) -> None:
        """Derive what depends on the number of devices: accumulation and when to validate."""
        trainer = self.trainer
        assert trainer is not None
        module: Any = trainer.lightning_module
        self.check(module.config.vocab_size)
        self._micro, self._accumulate = self.micro_batches(trainer.world_size)
        if stage == "fit":
            every = math.ceil(trainer.max_steps / self.validations)
            trainer.accumulate_grad_batches = self._accumulate
            trainer.val_check_interval = every * self._accumulate

    def _open(self, split: Literal["train", "val"], *, shuffle: bool) -> TokenDataset:
        seed = torch.initial_seed() if self.seed is None else self.seed
        return open_split(
            Path(self.corpus.dir),
            split,
            seq_len=self.seq_len,
            seed=seed % 2**31,
            shuffle=shuffle,
            unit=self._micro * self._accumulate if shuffle else 1,
        )

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled blocks; its state_dict is the exact position in the corpus."""
        loader: DataLoader[Any] = TokenLoader(
            self._open("train", shuffle=True),
            batch_size=self._micro,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
        )
        return loader

    def val_dataloader(self) -> DataLoader[Any]:
        """`val_sequences` blocks, evenly spread over the validation split: the same at each validation."""
        subset = self._spread(self.val_sequences)
        # Evaluation keeps no graph, so small micro-batches can be put together.
        return DataLoader(subset, batch_size=max(self._micro, min(32, len(subset))))

    def held_out(self, n_sequences: int) -> Tensor:
        """Blocks (n, seq_len + 1) spread evenly over the validation split: the same in every run, on every rank.

        Args:
            n_sequences: fewer where the split is smaller.
        """
        subset = self._spread(n_sequences)
        return torch.stack([subset[i] for i in range(len(subset))])

    def _spread(self, n_sequences: int | None) -> "Subset[Any]":
        dataset = self._open("val", shuffle=False)
        n = self.manifest.val.blocks(self.seq_len)  # of all ranks, where len(dataset) is one rank's share
        k = min(n_sequences or n, n)
        return Subset(dataset, [i * n // k for i in range(k)])
