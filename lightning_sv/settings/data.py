"""Settings of the data of a run: a corpus, sequences and batches."""

import logging
import math
from bisect import bisect
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_sv.corpus import (
    CorpusConfig,
    Manifest,
    RankShare,
    check_corpus,
    is_remote,
    local_folder,
    open_split,
)
from lightning_sv.corpus.loader import limited
from lightning_sv.corpus.manifest import FILENAME
from lightning_sv.corpus.sources.files import changed_file
from lightning_sv.errors import ConfigError, expect, expect_types

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataConfig:
    """Settings of the tokens in an optimizer step; `lit.data.TokenDataModule` streams them.

    Each optimizer step sees `global_batch` sequences, the same for any number of devices, workers
    and micro-batches: `global_batch / (micro_batch x devices)` micro-batches are accumulated.

    Args:
        corpus: the corpus; `lightning-sv prepare` creates it, and training reads corpus.dir
        seq_len: predicted tokens per sequence
        global_batch: sequences per optimizer step, over all devices
        micro_batch: sequences per forward pass on a device; null for the largest that fits a GPU,
            or on a CPU for a device's full share if it is small. Only the order of sums and
            experts' balance loss depend on it
        num_workers: loader processes per device, which do not affect the order; 0 reads in the
            training process
        validations: number of validations in a run, evenly spaced, the last at the end; fewer if
            the number of steps is not a multiple of it
        val_sequences: sequences per validation, always the same, spread evenly over the split; null
            for all
        full_last_validation: if true, the last validation of a run reads the whole validation
            split, as `validate` does
        seed: seed of the order of the sequences; null for that of seed_everything
    """

    corpus: CorpusConfig
    seq_len: int
    global_batch: int
    micro_batch: int | None = None
    num_workers: int = 0
    validations: int = 20
    val_sequences: int | None = None
    full_last_validation: bool = True
    seed: int | None = None

    def __post_init__(self) -> None:
        expect_types("data", self)
        # torch's generator on the CPU uses the lower 32 bits of a seed
        is_seed = self.seed is None or 0 <= self.seed < 2**32
        expect(is_seed, "data.seed", self.seed, "an integer from 0 to 2^32 - 1.")
        expect(self.num_workers >= 0, "data.num_workers", self.num_workers, "at least 0.")
        for key in ("seq_len", "global_batch", "micro_batch", "validations", "val_sequences"):
            value = getattr(self, key)
            expect(value is None or value >= 1, f"data.{key}", value, "at least 1.")

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step, over all devices."""
        return self.global_batch * self.seq_len

    # The corpus

    @cached_property
    def folder(self) -> Path:
        """Folder of the corpus on this machine; one in an object store is downloaded."""
        return local_folder(self.corpus.dir)

    @cached_property
    def manifest(self) -> Manifest:
        """Manifest of the corpus, written by `lightning-sv prepare`."""
        return Manifest.load(self.folder)

    @property
    def is_prepared(self) -> bool:
        """True if the corpus is on this machine; nothing is downloaded."""
        return not is_remote(self.corpus.dir) and (self.folder / FILENAME).is_file()

    def epochs(self, tokens: int) -> float:
        """Return training tokens over the tokens of the training split."""
        return tokens / self.manifest.train.tokens

    def check(self, vocab_size: int, *, checksums: bool = True) -> None:
        """Check the corpus before the first step.

        With `checksums`, also check its hashes, and warn if the text has changed.

        Raises:
            ConfigError: the corpus is damaged, does not fit the model, or was prepared with other
                settings than those given; the message names the file or key
        """
        self._check_settings()
        check_corpus(
            self.manifest, self.folder, vocab_size=vocab_size, seq_len=self.seq_len,
            tokenizer=self.corpus.tokenizer, checksums=checksums,
        )  # fmt: skip
        if not checksums:
            return
        changed = changed_file(self.manifest)
        if changed is not None:
            log.warning("%s is used although its text has changed: %s", self.corpus.dir, changed)

    def _check_settings(self) -> None:
        """Check that the corpus was prepared with the settings that differ from the defaults."""
        prepared = self.manifest.settings
        default = CorpusConfig().settings()
        given = self.corpus.settings()
        del given["tokenizer"]  # `check_corpus` compares it
        for key, value in given.items():
            recorded = prepared.get(key, value)
            if value not in (default[key], recorded):
                expected = f"{recorded}, with which the corpus in {self.corpus.dir} was prepared"
                hint = "Prepare a different folder."
                raise ConfigError(f"data.corpus.{key} is {value}; expected {expected}. {hint}")

    # The batches

    def share(self, devices: int, rank: int = 0) -> RankShare:
        """Return the part of every optimizer step that one device reads."""
        per_device, rest = divmod(self.global_batch, devices)
        if rest:
            counts = divisors(self.global_batch)
            above = bisect(counts, devices)
            near = " or ".join(map(str, counts[above - 1 : above + 1]))
            hint = f"Use {near} devices, or a batch of {(per_device + 1) * devices}."
            expected = f"a multiple of {devices}, the number of devices. {hint}"
            raise ConfigError(f"data.global_batch is {self.global_batch}; expected {expected}")
        micro_batch = self.micro_batch or per_device
        if per_device % micro_batch:
            sizes = ", ".join(map(str, divisors(per_device)))
            expected = f"a divisor of {per_device}, the sequences per device: {sizes}."
            raise ConfigError(f"data.micro_batch is {micro_batch}; expected {expected}")
        return RankShare(self.global_batch, micro_batch, rank, devices)

    # The validation split

    def check_validation(self, devices: int) -> None:
        """Check that there is a validation sequence for every device."""
        sequences = self.validation_sequences
        if sequences < devices:
            expected = f"at least {devices}, the number of devices"
            hint = "Raise it, or prepare more validation text."
            raise ConfigError(f"data.val_sequences is {sequences}; expected {expected}. {hint}")

    @property
    def validation_sequences(self) -> int:
        """Sequences per validation before the last, over all devices."""
        available = self.manifest.val.sequences(self.seq_len)
        return min(self.val_sequences or available, available)

    @property
    def last_validation_sequences(self) -> int:
        """Sequences of the last validation, over all devices."""
        if self.full_last_validation:
            return self.manifest.val.sequences(self.seq_len)
        return self.validation_sequences

    def held_out(self, n_sequences: int) -> Tensor:
        """Return validation sequences (n, seq_len + 1), the same in every run and on every rank."""
        sequences, numbers = self.validation_split(n_sequences)
        return torch.stack([sequences[i] for i in numbers])

    def validation_split(self, n_sequences: int) -> tuple[Dataset[Tensor], list[int]]:
        """Return the validation split, and numbers of `n_sequences` sequences, evenly spread."""
        sequences = open_split(self.folder, "val", seq_len=self.seq_len)
        n = min(n_sequences, len(sequences))
        return sequences, [i * len(sequences) // n for i in range(n)]


class DataPlan:
    """Micro-batches, steps and validations of a run on a number of devices.

    Args:
        config: settings of the data, whose corpus is prepared
        devices: number of devices

    Attributes:
        accumulate: micro-batches per optimizer step and device
        batches_per_epoch: micro-batches per epoch and device

    Raises:
        ConfigError: the devices cannot share a step
    """

    def __init__(self, config: DataConfig, devices: int):
        self._config = config
        self.accumulate = config.share(devices).accumulate
        sequences = config.manifest.train.sequences(config.seq_len)
        self.batches_per_epoch = sequences // config.global_batch * self.accumulate

    def steps(self, max_steps: int, max_epochs: int | None, limit: float) -> int:
        """Return the optimizer steps of a run: `max_steps`, or fewer if `max_epochs` ends it.

        Args:
            max_steps: largest number of steps
            max_epochs: largest number of epochs; None or -1 for any
            limit: number or fraction of the micro-batches of an epoch that are read

        Raises:
            ConfigError: an epoch would end inside a step
        """
        batches = limited(self.batches_per_epoch, limit)
        if batches % self.accumulate:
            expected = f"a number of batches that is a multiple of {self.accumulate}, a step's."
            raise ConfigError(f"trainer.limit_train_batches is {limit}; expected {expected}")
        if max_epochs in (None, -1):
            return max_steps
        return min(max_steps, max_epochs * (batches // self.accumulate))

    def validation_interval(self, steps: int) -> int:
        """Return the micro-batches between two validations of a run of so many steps."""
        return math.ceil(steps / self._config.validations) * self.accumulate


def divisors(n: int) -> list[int]:
    """Return the divisors of n in ascending order."""
    divisors: set[int] = set()
    for k in range(1, math.isqrt(n) + 1):
        if n % k == 0:
            divisors |= {k, n // k}
    return sorted(divisors)
