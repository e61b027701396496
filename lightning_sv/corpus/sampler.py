"""Order of the sequences in a run, determined by the seed for any number of devices and workers."""

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, SequentialSampler

from lightning_sv.errors import expect


@dataclass(frozen=True)
class RankShare:
    """Part of an optimizer step read by one device.

    Attributes:
        global_batch: sequences per optimizer step, over all devices
        micro_batch: sequences per forward pass on this device
        rank: rank of this device
        ranks: number of devices
    """

    global_batch: int
    micro_batch: int
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.ranks
        assert self.global_batch % (self.micro_batch * self.ranks) == 0, self

    @property
    def accumulate(self) -> int:
        """Number of micro-batches per optimizer step and device."""
        return self.global_batch // (self.micro_batch * self.ranks)


class DeviceSampler(SequentialSampler, DistributedSampler[Any]):
    """Yield the given keys of a dataset, which are those of one device, in their order.

    Lightning and Fabric split the sampler of a DataLoader over the devices, unless it is a
    DistributedSampler. Under overfit_batches Lightning replaces it, unless it is a
    SequentialSampler.

    Args:
        keys: keys of this device, e.g. numbers of sequences, or a list of numbers per batch
    """

    def __init__(self, keys: Sized):
        SequentialSampler.__init__(self, keys)
        DistributedSampler.__init__(self, keys, num_replicas=1, rank=0, shuffle=False)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data_source)  # type: ignore[call-overload]

    def __len__(self) -> int:
        return len(self.data_source)

    def set_epoch(self, epoch: int) -> None:
        """Ignore Lightning's number of epochs read in this process."""


class GlobalBatchSampler(DeviceSampler):
    """Order of the sequences: each epoch is a permutation, cut into steps for all devices.

    Step s of epoch e has the sequences p[s G], ..., p[s G + G - 1], with G the global batch and p
    the permutation of (seed, e). Rank r of R reads the r-th of R equal parts of them, in
    micro-batches. The sequences of a step thus do not depend on devices, workers or micro-batch.
    Sequences beyond the last full global batch are skipped.

    Raises:
        ConfigError: there are fewer sequences than in a global batch
    """

    def __init__(self, n_sequences: int, share: RankShare, seed: int):
        batch = share.global_batch
        hint = "Lower it or data.seq_len, or prepare more text."
        expected = f"at least data.global_batch, {batch}. {hint}"
        expect(n_sequences >= batch, "the number of training sequences", n_sequences, expected)
        super().__init__(range(n_sequences))
        self.n_sequences = n_sequences
        self.share = share
        self.seed = seed
        self.epoch = 0
        #: micro-batches to skip in the epoch, because they were read before
        self.start = 0

    def __len__(self) -> int:
        """Return the number of micro-batches per epoch and device."""
        return self.n_sequences // self.share.global_batch * self.share.accumulate

    def __iter__(self) -> Iterator[Any]:
        """Yield the sequence numbers of each micro-batch of this device."""
        share = self.share
        parts = self._steps(self.epoch).view(-1, share.ranks, share.accumulate, share.micro_batch)
        # by index, because iterating over the tensor would create all of its rows first
        for i in range(self.start, len(self)):
            step, micro_step = divmod(i, share.accumulate)
            yield parts[step, share.rank, micro_step].tolist()

    def sequences(self, epoch: int, step: int) -> list[int]:
        """Return the sequence numbers of a step of an epoch, from 0, of all devices."""
        return self._steps(epoch)[step].tolist()

    def _steps(self, epoch: int) -> Tensor:
        """Return the sequence numbers of an epoch's steps, of shape (steps, global_batch)."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(self.n_sequences, generator=generator, dtype=torch.int32)
        batch = self.share.global_batch
        return order[: self.n_sequences // batch * batch].view(-1, batch)
