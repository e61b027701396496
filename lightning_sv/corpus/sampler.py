"""The order in which a run reads the sequences: fixed by the seed alone, on any number of devices and workers."""

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from lightning_sv.corpus.shards import Sequences
from lightning_sv.errors import ConfigError, RunError


@dataclass(frozen=True)
class RankShare:
    """What one device reads of every optimizer step.

    Attributes:
        global_batch: sequences an optimizer step, over all devices
        micro_batch: sequences this device reads at once
        rank: of this device
        ranks: how many devices there are
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
        """Micro-batches a device reads for one optimizer step."""
        return self.global_batch // (self.micro_batch * self.ranks)


class GlobalBatchSampler(Sampler[list[int]]):
    """Each epoch is a permutation of all sequences, cut into global batches, of which every device reads its share.

    Step s of epoch e has the sequences p[s G], ..., p[s G + G - 1], with G the global batch and p the permutation
    of (seed, e). Rank r of R reads the r-th of R equal parts of them, in micro-batches. So the step's sequences do not
    depend on devices, workers or micro-batch. Sequences that fill no global batch are left out, others each epoch.

    Args:
        n_sequences: in the split
        share: what this device reads
        seed: of the permutations

    Raises:
        ConfigError: there are fewer sequences than a global batch has
    """

    def __init__(self, n_sequences: int, share: RankShare, seed: int):
        if n_sequences < share.global_batch:
            raise ConfigError(
                f"The training split has {n_sequences}, fewer than the {share.global_batch} sequences of a global "
                "batch; lower data.global_batch or data.seq_len, or prepare more text."
            )
        self.n_sequences, self.share, self.seed = n_sequences, share, seed
        self.epoch = 0
        #: micro-batches of the epoch to leave out, because they were read before
        self.start = 0

    def __len__(self) -> int:
        """Micro-batches a device reads in an epoch."""
        return self.n_sequences // self.share.global_batch * self.share.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        """The numbers of the sequences of each micro-batch of this device."""
        order = self._permutation(self.epoch)
        for micro_batch in range(self.start, len(self)):
            first = self._first(micro_batch)
            yield order[first : first + self.share.micro_batch].tolist()

    def sequences(self, epoch: int, step: int) -> list[int]:
        """The numbers of the sequences of a step over all devices: step counts from 0 in each epoch."""
        first = step * self.share.global_batch
        return self._permutation(epoch)[first : first + self.share.global_batch].tolist()

    def _permutation(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(self.n_sequences, generator=generator, dtype=torch.int32)

    def _first(self, micro_batch: int) -> int:
        step, part = divmod(micro_batch, self.share.accumulate)
        share = self.share
        return step * share.global_batch + (share.rank * share.accumulate + part) * share.micro_batch


class TokenLoader(DataLoader[Tensor]):
    """Micro-batches (B, seq_len + 1), int64, as `GlobalBatchSampler` orders them; any number of devices can resume.

    Args:
        sequences: of the training split
        share: what this device reads
        seed: of the order
        num_workers: processes that read; 0 reads in this one. The order does not depend on it
        pin_memory: whether batches lie in page-locked memory
    """

    def __init__(
        self, sequences: Sequences, share: RankShare, *, seed: int = 0, num_workers: int = 0, pin_memory: bool = False
    ):
        self.sequences, self.order = sequences, GlobalBatchSampler(len(sequences), share, seed)
        # A generator of its own: else each epoch would draw from the one that training may use.
        super().__init__(
            sequences,
            batch_sampler=self.order,
            num_workers=num_workers,
            pin_memory=pin_memory,
            worker_init_fn=_outlive_signals,
            generator=torch.Generator().manual_seed(seed),
        )
        self._epoch, self._read = -1, 0
        self._loaded = False

    def __iter__(self) -> Iterator[Tensor]:  # type: ignore[override]
        """Start an epoch, or continue the one that was loaded."""
        if not self._loaded:
            self._epoch, self._read = self._epoch + 1, 0
        self._loaded = False
        self.order.epoch, self.order.start = self._epoch, self._read
        # Lightning stops after len() batches without exhausting the iterator: all that counts is set before a yield.
        try:
            for batch in super().__iter__():
                self._read += 1
                yield batch
        except (EOFError, ConnectionError) as error:  # of a pipe whose other end is gone; torch names the rest
            raise RunError(f"a data loader worker died ({type(error).__name__} while it was read from)") from error

    def position(self) -> tuple[int, int]:
        """Epoch, and step in it (from 0), of the last micro-batch handed out."""
        return self._epoch, max(0, self._read - 1) // self.order.share.accumulate

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch handed out: plain values, the same on every rank."""
        share = self.order.share
        # The end of an epoch is the start of the next: Lightning would count an epoch without a batch.
        ended = self._read == len(self.order)
        return {
            "epoch": self._epoch + ended,
            "sequences": 0 if ended else self._read * share.micro_batch * share.ranks,
            "global_batch": share.global_batch,
            "seed": self.order.seed,
            "seq_len": self.sequences.seq_len,
            "corpus_hash": self.sequences.corpus_hash,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position in the next iteration.

        Raises:
            ConfigError: the position is one of another corpus, seed, length or batch, or lies inside a step
        """
        mine = self.state_dict()
        if set(state) != set(mine):
            raise ConfigError("The checkpoint's data position is not one of this version; start a new run.")
        if state["corpus_hash"] != mine["corpus_hash"]:
            raise ConfigError(
                f"The checkpoint was trained on the corpus {str(state['corpus_hash'])[:12]}, this is "
                f"{mine['corpus_hash'][:12]}; resume with the same corpus, or start a new run."
            )
        for name in ("seed", "seq_len", "global_batch"):
            if state[name] != mine[name]:
                raise ConfigError(
                    f"The checkpoint's data has {name}={state[name]}, this run has {mine[name]}; "
                    "resume with the same value, or start a new run."
                )
        share = self.order.share
        if state["sequences"] % share.global_batch:
            raise ConfigError("The checkpoint was saved inside an optimizer step; resume from one saved after a step.")
        self._epoch, self._read = state["epoch"], state["sequences"] // (share.micro_batch * share.ranks)
        self._loaded = self._epoch >= 0


def _outlive_signals(worker: int) -> None:
    """What asks a run to stop often reaches its workers too, and they are needed to the end of the step.

    From the run itself SIGTERM ends a worker: that is how Python ends what is left of them when it exits.
    """
    if not hasattr(signal, "sigwaitinfo"):  # macOS
        return
    numbers = {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def listen() -> None:
        while signal.sigwaitinfo(numbers).si_pid != os.getppid():
            pass
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
