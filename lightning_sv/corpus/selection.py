"""The documents of a corpus: those of its parts that are no duplicates, up to its limit."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_sv.corpus.job import Job
from lightning_sv.corpus.parts import Part


@dataclass(frozen=True)
class KeptPart:
    """A part, and which of its documents are in the corpus.

    Attributes:
        part: a complete part
        rows: True for each document that is kept (n,)
    """

    part: Part
    rows: np.ndarray

    def total(self, column: str) -> int:
        """Return the sum of a column of the part's table, over the documents that are kept."""
        return int(self.part.documents()[column][self.rows].sum(dtype=np.int64))

    def lengths(self, split: str) -> np.ndarray:
        """Return the number of tokens of each document in a split (n,), 0 if it is dropped."""
        lengths = self.part.documents()[f"{split}_tokens"].astype(np.int64)
        return np.where(self.rows, lengths, 0)


@dataclass(frozen=True)
class Selection:
    """The documents of a corpus.

    Attributes:
        parts: its parts, in order
        duplicates: number of documents dropped because of equal text
        is_limited: True if a limit ends the corpus before the last document
        is_full: True if that is the limit on tokens
    """

    parts: list[KeptPart]
    duplicates: int
    is_limited: bool
    is_full: bool

    @classmethod
    def of_first(cls, job: Job, count: int) -> "Selection":
        """Return the documents of the first `count` parts of a job."""
        config = job.config
        parts = job.parts[:count]
        return cls.of_parts(parts, max_bytes=config.limit, max_tokens=config.max_tokens)

    @classmethod
    def of_parts(
        cls, parts: Sequence[Part], *, max_bytes: int | None, max_tokens: int | None
    ) -> "Selection":
        """Drop duplicates, and all documents from the first on that would exceed a limit."""
        kept: list[KeptPart] = []
        duplicates = 0
        n_bytes = 0
        n_tokens = 0
        is_limited = False
        is_full = False
        for part, rows in zip(parts, _first_of_equal(parts), strict=True):
            if is_limited:  # by an earlier part
                rows[:] = False  # in place, because a corpus may have 100 million documents
                kept.append(KeptPart(part, rows))
                continue
            table = part.documents()
            lengths = table["train_tokens"].astype(np.int64) + table["val_tokens"]
            bytes_so_far = n_bytes + np.cumsum(table["n_bytes"] * rows, dtype=np.int64)
            tokens_so_far = n_tokens + np.cumsum(lengths * rows)
            end_of_tokens = _n_within(tokens_so_far, max_tokens)
            end = min(_n_within(bytes_so_far, max_bytes), end_of_tokens)
            is_limited = end < len(table)
            is_full = is_limited and end == end_of_tokens
            duplicates += int(np.count_nonzero(~rows[:end]))
            if end:
                n_bytes = int(bytes_so_far[end - 1])
                n_tokens = int(tokens_so_far[end - 1])

            rows[end:] = False
            kept.append(KeptPart(part, rows))
        return cls(kept, duplicates, is_limited, is_full)

    def total(self, column: str) -> int:
        """Return the sum of a column of the tables of all parts."""
        return sum(part.total(column) for part in self.parts)

    @property
    def n_tokens(self) -> int:
        """Tokens of both splits."""
        return self.total("train_tokens") + self.total("val_tokens")

    def text_bytes(self, split: str) -> int:
        """Return the bytes of the text of a split."""
        val_bytes = self.total("val_bytes")
        return val_bytes if split == "val" else self.total("n_bytes") - val_bytes


def _first_of_equal(parts: Sequence[Part]) -> list[np.ndarray]:
    """Return for each part whether a document is the first of its text (n,)."""
    hashes = [part.documents()["digest"] for part in parts]
    digests = np.concatenate(hashes)
    # stable, so the first of equal hashes stays first
    order = np.lexsort((digests[:, 1], digests[:, 0]))
    ordered = digests[order]
    repeats = (ordered[1:] == ordered[:-1]).all(axis=1)
    is_first = np.ones(len(digests), bool)
    is_first[order[1:][repeats]] = False
    ends = np.cumsum([len(part_hashes) for part_hashes in hashes])
    return np.split(is_first, ends[:-1])


def _n_within(sums: np.ndarray, limit: int | None) -> int:
    """Return the number of ascending sums that do not exceed the limit."""
    return len(sums) if limit is None else int(np.searchsorted(sums, limit, side="right"))
