"""Token shards in litdata's format: written, and read as sequences of seq_len + 1 ids."""

import json
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_sv.atomic import atomic_path, file_sha256
from lightning_sv.corpus.manifest import SPLITS, Manifest, Shard
from lightning_sv.corpus.remote import local_folder
from lightning_sv.corpus.validate import check_corpus, index_of
from lightning_sv.errors import expect, expect_known

Split = Literal["train", "val"]


@dataclass(frozen=True)
class Span:
    """Documents of a part that are consecutive in a shard: rows [start, stop) of its table."""

    part: int
    start: int
    stop: int


def plan_shards(sizes: Iterable[np.ndarray], chunk_bytes: int) -> list[list[Span]]:
    """Distribute documents over shards of at most `chunk_bytes`, as litdata's writer does.

    A shard ends before the document that would exceed `chunk_bytes`. A larger document has its own
    shard.

    Args:
        sizes: for each part the bytes of the tokens of its documents (n,), 0 for documents that are
            dropped
        chunk_bytes: maximum size of a shard's tokens
    """
    of_parts = list(sizes)
    bounds = [0, *accumulate(map(len, of_parts))]  # first document of each part, among all
    ends = np.cumsum(np.concatenate(of_parts), dtype=np.int64)
    return [_spans(first, stop, bounds) for first, stop in _cut(ends, chunk_bytes)]


def _cut(ends: np.ndarray, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the range of documents of each shard, from the bytes up to the end of each document."""
    first = 0
    before = 0
    while first < len(ends):
        stop = int(np.searchsorted(ends, before + chunk_bytes, side="right"))
        stop = max(stop, first + 1)  # a document that is larger than a shard
        after = int(ends[stop - 1])
        if after > before:  # else all of them are dropped
            yield first, stop
        first = stop
        before = after


def _spans(first: int, stop: int, bounds: Sequence[int]) -> list[Span]:
    """Return a range of the documents of all parts as rows of the parts."""
    spans = []
    while first < stop:
        part = bisect(bounds, first) - 1
        end = min(stop, bounds[part + 1])
        spans.append(Span(part, first - bounds[part], end - bounds[part]))
        first = end
    return spans


def write_shard(
    path: Path, documents: Iterable[np.ndarray], tokens: Iterable[np.ndarray]
) -> dict[str, Any]:
    """Write a shard in litdata's format; return what `Shard` needs, and its largest token.

    The format is the number of documents, their offsets and the end (uint32), and the tokens.

    Args:
        path: file to write
        documents: number of bytes of each document (n,), in several arrays
        tokens: tokens of the documents, in several arrays
    """
    sizes = np.concatenate([np.zeros(1, np.int64), *documents])
    header = 4 * (len(sizes) + 1)
    offsets = header + np.cumsum(sizes)
    found = f"{offsets[-1]:,} bytes in one document"
    expect(offsets[-1] < 1 << 32, "chunk_bytes", found, "less than 4 GiB.")
    largest = 0
    n_tokens = 0
    with atomic_path(path) as partial:
        with partial.open("wb") as file:
            file.write(np.uint32(len(sizes) - 1).tobytes())
            file.write(offsets.astype(np.uint32).tobytes())
            for ids in tokens:
                file.write(np.ascontiguousarray(ids).data)
                largest = max(largest, int(ids.max(initial=0)))
                n_tokens += len(ids)
        digest = file_sha256(partial)
    return {
        "bytes": int(offsets[-1]),
        "sha256": digest,
        "documents": len(sizes) - 1,
        "tokens": n_tokens,
        "largest_token": largest,
    }


def write_index(folder: Path, shards: Sequence[Shard], chunk_bytes: int, dtype: np.dtype) -> None:
    """Write litdata's index of the shards in a folder."""
    index = index_of(shards, chunk_bytes, dtype.name)
    (folder / "index.json").write_text(json.dumps(index, sort_keys=True))


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
    return Sequences(dir.resolve() / split, seq_len, n, manifest.corpus_hash)


class Sequences(Dataset[Tensor]):
    """Sequences of one split in the order of its shards, int64 of shape (seq_len + 1,).

    `open_split` opens them. litdata maps the shards in place, without a copy, cache or lock files.
    """

    def __init__(self, folder: Path, seq_len: int, n: int, corpus_hash: str):
        self.seq_len = seq_len
        self.corpus_hash = corpus_hash
        self._n = n
        from litdata import StreamingDataset
        from litdata.streaming.item_loader import TokensLoader

        self._stream = StreamingDataset(
            str(folder),
            item_loader=TokensLoader(block_size=seq_len + 1),
            shuffle=False,
            drop_last=False,
        )

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, number: int) -> Tensor:
        """Read one sequence; `IndexError` beyond the last."""
        if not 0 <= number < self._n:
            raise IndexError(f"sequence {number} of {self._n}")
        return torch.from_numpy(self._stream[int(number)].astype(np.int64))
