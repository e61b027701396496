"""Duplicates among the documents of all parts, and the end of a limited corpus.

The first of several equal documents is kept, in the order of the parts. Documents with equal hashes
are found by sorting, one bucket of hashes after another, so that memory is bounded: one byte per
document, and 70 bytes per document of a bucket of at most 2^23, together 0.7 GB for 100 million
documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

#: maximum number of documents that are sorted at once
BUCKET = 1 << 23


class Documents(Protocol):
    """A part, of which `documents` maps the table from the disk."""

    def documents(self) -> np.ndarray:
        """Return the table of the part."""
        ...


@dataclass(frozen=True)
class Kept:
    """The documents of a corpus.

    Attributes:
        rows: for each part whether a document is in the corpus (n,)
        duplicates: number of duplicates before the end
        is_limited: True if the limit ends the corpus before the last document
    """

    rows: list[np.ndarray]
    duplicates: int
    is_limited: bool


def keep_documents(
    parts: Sequence[Documents], *, max_bytes: int | None, max_tokens: int | None
) -> Kept:
    """Drop duplicates, and all documents from the first on that would exceed a limit."""
    rows = _first_of_equal(parts)
    duplicates = n_bytes = n_tokens = 0
    is_limited = False
    for part, is_first in zip(parts, rows, strict=True):
        if is_limited:
            is_first[:] = False
            continue
        table = part.documents()
        sums_bytes = n_bytes + np.cumsum(table["n_bytes"] * is_first, dtype=np.int64)
        tokens = table["train_tokens"].astype(np.int64) + table["val_tokens"]
        sums_tokens = n_tokens + np.cumsum(tokens * is_first)
        end = min(_end(sums_bytes, max_bytes), _end(sums_tokens, max_tokens))
        duplicates += int((~is_first[:end]).sum())
        is_first[end:] = False
        is_limited = end < len(table)
        n_bytes += int((table["n_bytes"] * is_first).sum(dtype=np.int64))
        n_tokens += int((tokens * is_first).sum())
    return Kept(rows, duplicates, is_limited)


def _end(sums: np.ndarray, limit: int | None) -> int:
    """Return the first index at which a sum exceeds the limit."""
    return len(sums) if limit is None else int(np.searchsorted(sums, limit, side="right"))


def _first_of_equal(parts: Sequence[Documents]) -> list[np.ndarray]:
    """Return for each part whether a document is the first of its text (n,)."""
    sizes = [len(part.documents()) for part in parts]
    starts = np.concatenate(([0], np.cumsum(sizes)))
    is_first = np.ones(starts[-1], bool)
    buckets = -(-int(starts[-1]) // BUCKET)
    for bucket in range(buckets):
        digests, rows = _bucket(parts, starts, bucket, buckets)
        # stable, so the first of equal hashes stays first
        order = np.lexsort((digests[:, 1], digests[:, 0]))
        ordered = digests[order]
        repeats = (ordered[1:] == ordered[:-1]).all(axis=1)
        is_first[rows[order[1:][repeats]]] = False
    return np.split(is_first, starts[1:-1])


def _bucket(
    parts: Sequence[Documents], starts: np.ndarray, bucket: int, buckets: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return hashes (n, 2) of a bucket, and the numbers of their documents (n,)."""
    digests = []
    rows = []
    for part, start in zip(parts, starts[:-1], strict=True):
        hashes = part.documents()["digest"]
        inside = np.flatnonzero(hashes[:, 1] % buckets == bucket)
        digests.append(hashes[inside])
        rows.append(inside + start)
    return np.concatenate(digests), np.concatenate(rows)
