"""Loader of a run's batches, with a position that checkpoints save."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_sv.corpus.sampler import GlobalBatchSampler, RankShare
from lightning_sv.corpus.sequences import Sequences
from lightning_sv.corpus.spawn import blocked
from lightning_sv.errors import ConfigError, RunError


class Batches(Dataset[Tensor]):
    """Batches (B, seq_len + 1) of a dataset of sequences (seq_len + 1,), by their numbers."""

    def __init__(self, sequences: Dataset[Tensor]):
        self.sequences = sequences

    def __getitem__(self, numbers: list[int]) -> Tensor:
        return torch.stack([self.sequences[number] for number in numbers])


def limited(batches: int, limit: float) -> int:
    """Return the batches of an epoch under limit_train_batches, a number or a fraction."""
    if isinstance(limit, int):
        return min(batches, limit)
    return int(batches * limit)


@dataclass(frozen=True)
class Epochs:
    """Epochs of a `TokenLoader`.

    Attributes:
        first: number of the first epoch
        repeat: if True, every epoch has the order of the first
        limit: number or fraction of an epoch's batches that are read, as Trainer's
            limit_train_batches
        unfinished: returns the number of batches read but not trained, as after an error in a step
        repeats_begun_step: if True, a resumed run begins the step again in which it was saved
    """

    first: int = 0
    repeat: bool = False
    limit: float = 1.0
    unfinished: Callable[[], int] = int
    repeats_begun_step: bool = False


class TokenLoader(DataLoader[Tensor]):
    """Load micro-batches (B, seq_len + 1), int64, in the order of `GlobalBatchSampler`.

    Its position is resumable.

    Args:
        sequences: sequences of the training split
        share: part of this device
        seed: seed of the order
        num_workers: number of reader processes, which does not affect the order; 0 to read in this
            process
        pin_memory: if True, batches are in page-locked memory
        epochs: first epoch, and what of each is read

    Raises:
        ConfigError: fewer sequences than in a global batch
    """

    def __init__(
        self,
        sequences: Sequences,
        share: RankShare,
        *,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
        epochs: Epochs = Epochs(),
    ):
        self.sequences = sequences
        self.order = GlobalBatchSampler(len(sequences), share, seed)
        # A private generator: otherwise each epoch would advance the global one.
        super().__init__(
            Batches(sequences),
            batch_size=None,  # the sampler yields batches
            sampler=self.order,
            num_workers=num_workers,
            pin_memory=pin_memory,
            worker_init_fn=_outlive_signals,
            generator=torch.Generator().manual_seed(seed),
        )
        self._epochs = epochs
        #: micro-batches after which an epoch ends
        self._last = limited(len(self.order), epochs.limit)
        self._epoch = epochs.first
        #: micro-batches of the epoch that were read
        self._read = 0
        #: True if the epoch was iterated, so that the next iteration begins the next one; False
        #: also for a position that was loaded
        self._has_begun = False

    def __iter__(self) -> Iterator[Tensor]:  # type: ignore[override]
        """Start an epoch, or continue the loaded one."""
        if self._has_begun:
            self._epoch = self._next_epoch()
            self._read = 0
        self._has_begun = True
        self.order.epoch = self._epoch
        self.order.start = self._read
        try:
            # for the threads that torch starts in a worker before `_outlive_signals`
            with blocked(_SIGNALS):
                batches = super().__iter__()
            for batch in batches:
                # before the yield, because Lightning does not exhaust the iterator
                self._read += 1
                yield batch
        except RunError:
            self.sequences.check_unchanged()  # in one sentence; a worker's has its traceback
            raise
        except (EOFError, ConnectionError) as error:
            # a closed pipe; torch raises an error for other causes
            reason = f"{type(error).__name__} while it was read from"
            raise RunError(f"a data loader worker died ({reason})") from error

    def _next_epoch(self) -> int:
        if self._epochs.repeat:
            return self._epoch
        return self._epoch + 1

    def position(self) -> tuple[int, int]:
        """Return the epoch and the step in it (from 0) of the last yielded micro-batch."""
        return self._epoch, max(0, self._read - 1) // self.order.share.accumulate

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last trained batch, equal on all ranks."""
        share = self.order.share
        epoch = self._epoch
        trained = self._read
        if self._has_begun:
            trained -= self._epochs.unfinished()
        # Save the end of an epoch as the start of the next, because Lightning would count an epoch
        # without batches.
        if trained >= self._last:
            epoch = self._next_epoch()
            trained = 0
        return {
            "epoch": epoch,
            "sequences": self._sequences(trained),
            "epoch_sequences": self._sequences(self._last),
            "global_batch": share.global_batch,
            "seed": self.order.seed,
            "seq_len": self.sequences.seq_len,
            "corpus_hash": self.sequences.corpus_hash,
        }

    def _sequences(self, batches: int) -> int:
        """Return the number of sequences that all devices read in this number of micro-batches."""
        share = self.order.share
        return batches * share.micro_batch * share.ranks

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position in the next iteration.

        Raises:
            ConfigError: the position belongs to a different corpus, seed, sequence length, batch or
                epoch length, or is inside a step that the run does not begin again
        """
        current = self.state_dict()
        if set(state) != set(current):
            found = "the checkpoint's data position has a different format"
            raise ConfigError(f"{found}; start a new run.")
        _check_same_order(state, current)
        share = self.order.share
        steps = state["sequences"] // share.global_batch
        is_inside_step = state["sequences"] % share.global_batch > 0
        if is_inside_step and not self._epochs.repeats_begun_step:
            found = "the checkpoint was saved inside an optimizer step"
            hint = "Only a PretrainModule with a TokenDataModule begins the step again."
            raise ConfigError(f"{found}; expected one that was saved after a step. {hint}")
        self._epoch = state["epoch"]
        self._read = steps * share.accumulate
        self._has_begun = False


def _check_same_order(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Check that two positions have the same sequences, order and epochs."""
    for name in ("corpus_hash", "seed", "seq_len", "global_batch"):
        if saved[name] != current[name]:
            expected = f"{saved[name]}, as in the checkpoint"
            hint = "Resume with the same value, or start a new run."
            raise ConfigError(f"data.{name} is {current[name]}; expected {expected}. {hint}")
    if saved["epoch_sequences"] != current["epoch_sequences"]:
        found = f"an epoch has {current['epoch_sequences']} sequences"
        expected = f"{saved['epoch_sequences']}, as in the checkpoint"
        hint = "trainer.limit_train_batches counts the micro-batches of one device."
        raise ConfigError(f"{found}; expected {expected}. {hint}")


_SIGNALS = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT}


def _outlive_signals(worker: int) -> None:
    """Ignore signals that are sent to the process group: workers must finish the run's step.

    SIGTERM from the run itself still ends a worker; Python uses it at exit.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)

    def listen() -> None:
        while signal.sigwaitinfo(_SIGNALS).si_pid != os.getppid():
            pass
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
