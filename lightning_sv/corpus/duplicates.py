"""Duplicates among the documents of all parts.

The first of several equal documents is kept, in the order of the parts. Documents with equal hashes
are found by sorting, one bucket of hashes after another, so that memory is bounded: one byte per
document, and 70 bytes per document of a bucket of at most 2^23, together 0.7 GB for 100 million
documents.
"""

from collections.abc import Sequence

import numpy as np

from lightning_sv.corpus.parts import Part

#: maximum number of documents that are sorted at once
BUCKET = 1 << 23


def first_of_equal(parts: Sequence[Part]) -> list[np.ndarray]:
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
    parts: Sequence[Part], starts: np.ndarray, bucket: int, buckets: int
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
