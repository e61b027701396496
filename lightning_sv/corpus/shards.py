"""Token shards in litdata's format: documents in order, cut into files, with an index."""

import json
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from lightning_sv.atomic import atomic_path, file_sha256
from lightning_sv.corpus.manifest import Shard
from lightning_sv.errors import expect

# litdata's names of 1-D NumPy arrays of these types. Other formats are rejected: some are pickles.
_DATA_FORMATS = {"uint16": ["no_header_numpy:5"], "uint32": ["no_header_numpy:6"]}
# Settings of litdata's index of uncompressed shards, one 1-D NumPy array per document.
_INDEX = {
    "chunk_size": None,
    "compression": None,
    "compression_batch_size": None,
    "compression_level": None,
    "data_spec": '[1, {"type": null, "context": null, "children_spec": []}]',
    "encryption": None,
    "ipc_compression": None,
    "item_loader": "TokensLoader",
    "types": "json",
}


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
    ends = np.concatenate(of_parts, dtype=np.int64)
    np.cumsum(ends, out=ends)  # in place, because a corpus may have 100 million documents
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
    n_documents = len(sizes) - 1
    offsets = header_bytes(n_documents) + np.cumsum(sizes)
    found = f"{offsets[-1]:,} bytes in one document"
    expect(offsets[-1] < 1 << 32, "chunk_bytes", found, "less than 4 GiB.")
    largest = 0
    n_tokens = 0
    with atomic_path(path) as partial:
        with partial.open("wb") as file:
            file.write(np.uint32(n_documents).tobytes())
            file.write(offsets.astype(np.uint32).tobytes())
            for ids in tokens:
                file.write(np.ascontiguousarray(ids).data)
                largest = max(largest, int(ids.max(initial=0)))
                n_tokens += len(ids)
        digest = file_sha256(partial)
    return {
        "bytes": int(offsets[-1]),
        "sha256": digest,
        "documents": n_documents,
        "tokens": n_tokens,
        "largest_token": largest,
    }


def write_index(folder: Path, shards: Sequence[Shard], chunk_bytes: int, dtype: np.dtype) -> None:
    """Write litdata's index of the shards in a folder."""
    index = index_of(shards, chunk_bytes, dtype.name)
    (folder / "index.json").write_text(json.dumps(index, sort_keys=True))


def index_of(shards: Sequence[Shard], chunk_bytes: int, dtype: str) -> dict[str, Any]:
    """Return the content of litdata's index of some shards."""
    chunks = [
        {
            "chunk_bytes": shard.bytes,
            "chunk_size": shard.documents,
            "dim": shard.tokens,
            "filename": Path(shard.file).name,
        }
        for shard in shards
    ]
    config = _INDEX | {"chunk_bytes": chunk_bytes, "data_format": _DATA_FORMATS[dtype]}
    return {"chunks": chunks, "config": config}


def header_bytes(documents: int) -> int:
    """Return the bytes before the tokens: number of documents, offsets and the end, in uint32."""
    return 4 * (documents + 2)
