"""Sequences of seq_len + 1 ids of a prepared corpus."""

from bisect import bisect
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_sv.corpus.manifest import SPLITS, Manifest, Shard
from lightning_sv.corpus.remote import local_folder
from lightning_sv.corpus.shards import header_bytes
from lightning_sv.corpus.validate import check_corpus
from lightning_sv.errors import ConfigError, expect_known

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
    return Sequences(dir.resolve(), split, seq_len, manifest)


class Sequences(Dataset[Tensor]):
    """Sequences of one split in the order of its shards, int64 of shape (seq_len + 1,).

    `open_split` opens them. All shards are mapped at once, so that a run keeps reading the corpus
    with which it started if `prepare` replaces the folder, e.g. by a larger corpus.
    """

    def __init__(self, folder: Path, split: Split, seq_len: int, manifest: Manifest):
        self.folder = folder
        self.split = split
        self.seq_len = seq_len
        self.corpus_hash = manifest.corpus_hash
        dtype: torch.dtype = getattr(torch, manifest.dtype)
        shards = manifest.splits[split].shards
        #: sequences of each shard (n, seq_len + 1)
        self._shards = [_mapped(folder, shard, dtype, seq_len + 1) for shard in shards]
        #: number of sequences up to the end of each shard
        self._ends = list(accumulate(map(len, self._shards)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> Tensor:
        """Read one sequence; `IndexError` beyond the last."""
        if not 0 <= number < len(self):
            raise IndexError(f"sequence {number} of {len(self)}")
        shard = bisect(self._ends, number)
        number_from_end = number - self._ends[shard]  # below 0
        return self._shards[shard][number_from_end].long()

    def __reduce__(self) -> tuple[Any, ...]:
        # a loader process that is not forked maps the shards itself; torch would copy all of them
        return _opened_again, (self.folder, self.split, self.seq_len, self.corpus_hash)


def _mapped(folder: Path, shard: Shard, dtype: torch.dtype, length: int) -> Tensor:
    """Map the sequences of a shard (n, length), without its header and its last tokens.

    torch keeps no file open, unlike NumPy; a corpus can have more shards than a process may open.
    """
    size = shard.bytes // dtype.itemsize
    content = torch.from_file(str(folder / shard.file), shared=False, size=size, dtype=dtype)
    tokens = content[header_bytes(shard.documents) // dtype.itemsize :]
    n_sequences = len(tokens) // length
    return tokens[: n_sequences * length].view(n_sequences, length)


def _opened_again(folder: Path, split: Split, seq_len: int, corpus_hash: str) -> Sequences:
    """Open a split in a different process.

    Raises:
        ConfigError: the folder has a different corpus by now
    """
    sequences = open_split(folder, split, seq_len=seq_len)
    if sequences.corpus_hash != corpus_hash:
        expected = f"corpus {corpus_hash[:12]}, with which this run started"
        found = f"{folder} has corpus {sequences.corpus_hash[:12]}"
        raise ConfigError(f"{found}; expected {expected}. Restore it, or start a new run.")
    return sequences
