"""The LightningDataModule: sequences of tokens from a prepared corpus, in an order fixed by the seed."""

import itertools
import math
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sv.corpus import TokenLoader, open_split
from lightning_sv.settings.data import Batches

#: validation reads at least this many tokens at once, as far as whole sequences go
VALIDATION_TOKENS = 2048


class TokenDataModule(Batches, L.LightningDataModule):
    """Streams (micro_batch, seq_len + 1) token ids from litdata shards, see `Batches`."""

    def setup(self, stage: str) -> None:
        """Derive what depends on the number of devices: accumulation and when to validate."""
        trainer = self.trainer
        assert trainer is not None
        module: Any = trainer.lightning_module
        self.check(module.config.vocab_size, checksums=False)  # the command has hashed the shards
        self._share = self.share(trainer.world_size, trainer.global_rank)
        self.check_validation(trainer.world_size)
        if stage == "fit":
            every = math.ceil(trainer.max_steps / self.validations)
            trainer.accumulate_grad_batches = self._share.accumulate
            trainer.val_check_interval = every * self._share.accumulate

    @property
    def _on_cuda(self) -> bool:
        """Whether batches go to a GPU, which copies from page-locked memory without waiting."""
        assert self.trainer is not None
        return bool(self.trainer.strategy.root_device.type == "cuda")

    def train_dataloader(self) -> TokenLoader:
        """Shuffled sequences; its state_dict is the exact position in the corpus."""
        return TokenLoader(
            open_split(self.corpus.dir, "train", seq_len=self.seq_len),
            self._share,
            seed=(torch.initial_seed() if self.seed is None else self.seed) % 2**31,
            num_workers=self.num_workers,
            pin_memory=self._on_cuda,
        )

    def val_dataloader(self) -> "DataLoader[Tensor]":
        """`val_sequences` of them, evenly spread over the validation split: the same at each validation.

        Devices read different parts of them, in equally many batches: sharded forward passes wait for each other.
        The batches are of one size where that is not too small, as the compiler makes code for each.
        """
        sequences = open_split(self.corpus.dir, "val", seq_len=self.seq_len)
        numbers = self.spread(len(sequences), self.validation_sequences)
        # Evaluation keeps no graph, so small micro-batches are put together.
        size = max(self._share.micro_batch, VALIDATION_TOKENS // self.seq_len)
        mean, rest = divmod(len(numbers), self._share.ranks)
        even = next(n for n in range(min(size, mean), 0, -1) if mean % n == 0)
        batches = math.ceil(mean / (even if not rest and 2 * even > size else size))
        mine = numbers[self._share.rank :: self._share.ranks]
        cuts = [i * len(mine) // batches for i in range(batches + 1)]
        return DataLoader(
            sequences,
            batch_sampler=[mine[a:b] for a, b in itertools.pairwise(cuts)],
            generator=torch.Generator(),
            pin_memory=self._on_cuda,
        )
