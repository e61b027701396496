"""Loaders of the validation split: for validation and tests."""

import math
from collections.abc import Iterator
from itertools import islice

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sv.callbacks.steps import is_at_end
from lightning_sv.corpus import RankShare
from lightning_sv.corpus.loader import Batches, limited
from lightning_sv.corpus.sampler import DeviceSampler
from lightning_sv.settings.data import DataConfig

#: Minimum number of tokens per validation batch, rounded to sequences.
VALIDATION_TOKENS = 2048


def validation_loader(
    data: DataConfig, share: RankShare, trainer: L.Trainer | None, *, pin_memory: bool
) -> "DataLoader[Tensor] | ValidationLoader":
    """Return the loader of what a Trainer does: a fit, or a validation or test on its own."""
    usual = _split_loader(data, share, data.validation_sequences, pin_memory=pin_memory)
    reads_all = data.validation_sequences == data.last_validation_sequences
    if reads_all or trainer is None or trainer.state.stage is None:
        return usual
    last = _split_loader(data, share, data.last_validation_sequences, pin_memory=pin_memory)
    if trainer.state.fn != "fit":
        return last
    return ValidationLoader(usual, last, trainer)


def _split_loader(
    data: DataConfig, share: RankShare, n_sequences: int, *, pin_memory: bool
) -> "DataLoader[Tensor]":
    """Return one device's part of validation sequences, evenly spread over the split.

    Devices read different sequences in the same number of batches, because sharded forward passes
    must match. Batch sizes differ by one at most, because the compiler specializes on each.
    """
    sequences, numbers = data.validation_split(n_sequences)
    # Evaluation saves no graph, so larger batches fit.
    size = max(share.micro_batch, VALIDATION_TOKENS // data.seq_len)
    n_batches = math.ceil(len(numbers) // share.ranks / size)
    parts = np.array_split(numbers[share.rank :: share.ranks], n_batches)
    return DataLoader(
        Batches(sequences),
        batch_size=None,  # the sampler yields batches
        sampler=DeviceSampler([part.tolist() for part in parts]),
        generator=torch.Generator(),
        pin_memory=pin_memory,
    )


class ValidationLoader:
    """Read some validation batches, and all of them after the last step of a fit.

    Lightning asks for the length once per fit and stops there. So the length is that of the last
    validation, and the others end earlier. Lightning's progress bar shows a part of its length in
    these.

    Args:
        usual: batches of a validation before the last
        last: batches of the last validation
        trainer: trainer of the fit, whose fraction limit_val_batches limits both
    """

    def __init__(self, usual: "DataLoader[Tensor]", last: "DataLoader[Tensor]", trainer: L.Trainer):
        self.usual = usual
        self.last = last
        self.trainer = trainer

    def __len__(self) -> int:
        return len(self.last)

    def __iter__(self) -> Iterator[Tensor]:
        if not self.trainer.sanity_checking and is_at_end(self.trainer):
            return iter(self.last)
        batches = limited(len(self.usual), self.trainer.limit_val_batches)
        return islice(self.usual, max(1, batches))
