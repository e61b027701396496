"""What a run reads: a corpus, cut into sequences and batches. Without Lightning."""

import logging
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from lightning_sv.corpus import CorpusConfig, Manifest, RankShare, check_corpus, local_folder, open_split
from lightning_sv.corpus.sources.registry import changed_text, listed
from lightning_sv.errors import ConfigError

log = logging.getLogger(__name__)

#: loader processes of a device; more are a typing error, and would exhaust the machine
_MOST_WORKERS = 256


@dataclass
class DataConfig:
    """Which tokens an optimizer step sees; `lit.data.TokenDataModule` streams them.

    Each optimizer step sees `global_batch` sequences, the same on any number of devices, workers and
    micro-batches: `global_batch / (micro_batch x devices)` micro-batches are accumulated.

    Args:
        corpus: the corpus; `lightning-sv prepare` makes it, training reads corpus.dir
        seq_len: tokens a sequence predicts
        global_batch: sequences an optimizer step, over all devices
        micro_batch: sequences a device processes at once; null for the largest that fits a GPU (on a CPU for all of
            a device's share, if that is small). Nothing but the order of sums depends on it
        num_workers: loader processes a device; 0 reads in the training process. The order does not depend on it
        validations: validations in a run, evenly spaced, the last at the end
        val_sequences: sequences each validation reads, spread evenly over the split and always the same;
            null for the whole split
        seed: of the order of the sequences; null for seed_everything's
    """

    corpus: CorpusConfig
    seq_len: int
    global_batch: int
    micro_batch: int | None = None
    num_workers: int = 0
    validations: int = 20
    val_sequences: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ConfigError(f"data.seed is {self.seed}; expected a whole number from 0 to 2^63 - 1.")
        for key in ("seq_len", "global_batch", "micro_batch", "validations", "val_sequences", "num_workers"):
            value, least = getattr(self, key), int(key != "num_workers")
            if value is not None and value < least:
                raise ConfigError(f"data.{key} is {value}; expected at least {least}.")
        if self.num_workers > _MOST_WORKERS:
            raise ConfigError(f"data.num_workers is {self.num_workers}; expected a number from 0 to {_MOST_WORKERS}.")

    @property
    def tokens_per_step(self) -> int:
        """Tokens an optimizer step sees, over all devices."""
        return self.global_batch * self.seq_len

    @cached_property
    def folder(self) -> Path:
        """Folder of the corpus on this machine; reading it downloads a corpus in an object store."""
        return local_folder(self.corpus.dir)

    @cached_property
    def manifest(self) -> Manifest:
        """What `lightning-sv prepare` recorded of the corpus."""
        return Manifest.load(self.folder)

    @property
    def eot(self) -> int:
        """Id of the end-of-text token between documents."""
        return self.manifest.eot

    def check(self, vocab_size: int, *, checksums: bool = True) -> None:
        """Refuse a corpus that cannot be trained on, before any step.

        Args:
            vocab_size: of the model
            checksums: whether to hash every shard, see `corpus.check_corpus`, and to warn if the text has changed

        Raises:
            ConfigError: names the file or key, and what to do
        """
        check_corpus(
            self.manifest,
            self.folder,
            vocab_size=vocab_size,
            seq_len=self.seq_len,
            tokenizer=self.corpus.tokenizer,
            checksums=checksums,
        )
        if checksums and (changes := changed_text(self.manifest)):
            log.warning("%s is used as it is, although its text has changed: %s", self.corpus.dir, listed(changes))

    @property
    def device_counts(self) -> tuple[int, ...]:
        """The numbers of devices that the global batch can be shared by."""
        batch = self.global_batch
        small = [n for n in range(1, math.isqrt(batch) + 1) if batch % n == 0]
        return tuple(sorted({*small, *(batch // n for n in small)}))

    def share(self, devices: int, rank: int = 0) -> RankShare:
        """Return what one of so many devices reads of every optimizer step.

        Raises:
            ConfigError: the global batch cannot be shared evenly
        """
        per_device, rest = divmod(self.global_batch, devices)
        if rest:
            near = self.device_counts
            below, above = max(n for n in near if n <= devices), min((n for n in near if n > devices), default=None)
            smaller, larger = per_device * devices, (per_device + 1) * devices
            raise ConfigError(
                f"data.global_batch {self.global_batch} cannot be shared evenly by {devices} devices; use "
                f"{below if above is None else f'{below} or {above}'} devices, or a batch of "
                f"{f'{smaller} or ' if smaller else ''}{larger}."
            )
        micro = self.micro_batch or per_device
        if per_device % micro:
            raise ConfigError(
                f"data.micro_batch {micro} does not divide the {per_device} sequences a device has of "
                f"data.global_batch {self.global_batch} on {devices} devices; "
                f"{', '.join(str(n) for n in range(1, per_device + 1) if per_device % n == 0)} do."
            )
        return RankShare(self.global_batch, micro, rank, devices)

    def check_validation(self, devices: int) -> None:
        """Refuse a validation that gives a device nothing.

        Raises:
            ConfigError: there are fewer sequences than devices
        """
        if self.validation_sequences < devices:
            raise ConfigError(
                f"data.val_sequences {self.validation_sequences} gives some of the {devices} devices nothing to "
                "validate on; raise it, or prepare more validation text."
            )

    @property
    def validation_sequences(self) -> int:
        """Sequences each validation reads, over all devices."""
        available = self.manifest.val.sequences(self.seq_len)
        return min(self.val_sequences or available, available)

    def held_out(self, n_sequences: int) -> Tensor:
        """Sequences (n, seq_len + 1) spread evenly over the validation split: the same in every run, on every rank."""
        sequences = open_split(self.folder, "val", seq_len=self.seq_len)
        return torch.stack([sequences[i] for i in self.spread(len(sequences), n_sequences)])

    @staticmethod
    def spread(n: int, k: int) -> list[int]:
        """At most k of the numbers below n, evenly spread."""
        k = min(k, n)
        return [i * n // k for i in range(k)]
