"""The documents of a corpus: those of its parts that are no duplicates, up to its limit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.parts import Part


@dataclass(frozen=True)
class Selection:
    """The documents of a corpus.

    Attributes:
        parts: its parts, in order
        rows: for each part, True for each document that is kept (n,)
        duplicates: number of documents dropped because of equal text
        is_limited: True if a limit ends the corpus before the last document
        is_full: True if that is the limit on tokens
    """

    parts: Sequence[Part]
    rows: list[np.ndarray]
    duplicates: int
    is_limited: bool
    is_full: bool

    @classmethod
    def of(cls, parts: Sequence[Part], config: CorpusConfig) -> "Selection":
        """Drop duplicates, and all documents from the first on that would exceed a limit."""
        tables = [part.documents() for part in parts]

        def column(name: str) -> np.ndarray:
            return np.concatenate([table[name] for table in tables])

        kept = _first_of_equal(column("digest"))
        n_tokens = column("train_tokens") + column("val_tokens")
        end_of_tokens = _n_within(n_tokens * kept, config.max_tokens)
        end = min(end_of_tokens, _n_within(column("n_bytes") * kept, config.limit))

        is_limited = end < len(kept)
        is_full = is_limited and end == end_of_tokens
        duplicates = end - int(np.count_nonzero(kept[:end]))
        kept[end:] = False
        ends = np.cumsum([len(table) for table in tables])
        return cls(parts, np.split(kept, ends[:-1]), duplicates, is_limited, is_full)

    def total(self, column: str) -> int:
        """Return the sum of a column of the tables of all parts, over the documents kept."""
        total = 0
        for part, rows in zip(self.parts, self.rows, strict=True):
            total += int(part.documents()[column][rows].sum(dtype=np.int64))
        return total

    @property
    def n_tokens(self) -> int:
        """Tokens of both splits."""
        return self.total("train_tokens") + self.total("val_tokens")

    def text_bytes(self) -> dict[str, int]:
        """Return the bytes of the text of each split."""
        val_bytes = self.total("val_bytes")
        return {"train": self.total("n_bytes") - val_bytes, "val": val_bytes}

    def tokens(self, split: str, dtype: np.dtype) -> Iterator[np.ndarray]:
        """Yield the tokens of each document of a split, in order."""
        for part, rows in zip(self.parts, self.rows, strict=True):
            lengths = part.documents()[f"{split}_tokens"]
            ends = np.cumsum(lengths, dtype=np.int64)
            documents = np.split(part.tokens(split, dtype), ends[:-1])
            yield from compress(documents, rows & (lengths > 0))


def _first_of_equal(digests: np.ndarray) -> np.ndarray:
    """Return for each document whether it is the first of its text (n,)."""
    # stable, so the first of equal hashes stays first
    order = np.lexsort((digests[:, 1], digests[:, 0]))
    ordered = digests[order]
    repeats = (ordered[1:] == ordered[:-1]).all(axis=1)
    is_first = np.ones(len(digests), bool)
    is_first[order[1:][repeats]] = False
    return is_first


def _n_within(sizes: np.ndarray, limit: int | None) -> int:
    """Return the number of first documents whose sizes add up to the limit at most."""
    if limit is None:
        return len(sizes)
    sums = np.cumsum(sizes, dtype=np.int64)
    return int(np.searchsorted(sums, limit, side="right"))
