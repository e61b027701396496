"""Sequences of seq_len + 1 ids of a prepared corpus."""

import os
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_sv.corpus.manifest import FILENAME, SPLITS, Manifest
from lightning_sv.corpus.remote import local_folder
from lightning_sv.corpus.validate import check_corpus
from lightning_sv.errors import RunError, expect_known

Split = Literal["train", "val"]


def open_split(dir: str | Path, split: Split, *, seq_len: int) -> "Sequences":
    """Open one split of a prepared corpus.

    Args:
        dir: folder of the corpus, or its address in an object store, such as s3://bucket/corpus
        split: 'train' or 'val'
        seq_len: predicted tokens per sequence; items have shape (seq_len + 1,), to be cut into
            inputs and targets

    Raises:
        ConfigError: the corpus is missing or damaged, or no shard has a sequence of seq_len + 1
            tokens
    """
    expect_known("split", split, SPLITS)
    dir = local_folder(dir)
    manifest = Manifest.load(dir)
    # Setup checks the hashes once; sizes are checked here, which is fast.
    check_corpus(manifest, dir, seq_len=seq_len, checksums=False)
    n = manifest.splits[split].sequences(seq_len)
    return Sequences(dir.resolve(), split, seq_len, n, manifest.corpus_hash)


class Sequences(Dataset[Tensor]):
    """Sequences of one split in the order of its shards, int64 of shape (seq_len + 1,).

    `open_split` opens them. litdata maps the shards in place, without a copy, cache or lock files.
    It maps a shard again after others, so it would read wrong tokens if the folder was deleted and
    prepared again meanwhile.
    """

    def __init__(self, folder: Path, split: Split, seq_len: int, n: int, corpus_hash: str):
        self.seq_len = seq_len
        self.corpus_hash = corpus_hash
        self._n = n
        self._manifest = folder / FILENAME
        self._opened = _identity(self._manifest)
        from litdata import StreamingDataset
        from litdata.streaming.item_loader import TokensLoader

        self._stream = StreamingDataset(
            str(folder / split),
            item_loader=TokensLoader(block_size=seq_len + 1),
            shuffle=False,
            drop_last=False,
        )

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, number: int) -> Tensor:
        """Read one sequence.

        Raises:
            IndexError: beyond the last
            RunError: the corpus is not the one that was opened
        """
        if not 0 <= number < self._n:
            raise IndexError(f"sequence {number} of {self._n}")
        self.check_unchanged()
        return torch.from_numpy(self._stream[int(number)].astype(np.int64))

    def check_unchanged(self) -> None:
        """Raise RunError if the corpus is not the one that was opened."""
        if _identity(self._manifest) != self._opened:
            expected = f"corpus {self.corpus_hash[:12]}, with which this run started"
            hint = "Prepare that one again, and resume the run."
            raise RunError(f"{self._manifest.parent} was replaced; expected {expected}. {hint}")


def _identity(file: Path) -> tuple[int, int] | None:
    """Return what differs if a file is replaced; None without the file."""
    try:
        status = os.stat(file)  # noqa: PTH116 (twice as fast)
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns
