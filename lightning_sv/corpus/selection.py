"""The documents of a corpus: those of its parts that are no duplicates, up to its limit."""

import math
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
        table: the documents of all parts (n,)
        kept: True for each document that is kept (n,)
        duplicates: number of documents dropped because of equal text
        is_limited: True if a limit ends the corpus before the last document
    """

    parts: Sequence[Part]
    table: np.ndarray
    kept: np.ndarray
    duplicates: int
    is_limited: bool

    @classmethod
    def of(cls, parts: Sequence[Part], config: CorpusConfig) -> "Selection":
        """Drop duplicates, and all documents from the first on that would exceed a limit."""
        import pandas  # imported here, because training does not need it

        table = np.concatenate([part.documents() for part in parts])
        kept = ~pandas.DataFrame(table["digest"]).duplicated().to_numpy()
        n_bytes = table["train_bytes"] + table["val_bytes"]
        n_tokens = table["train_tokens"] + table["val_tokens"]
        end_of_bytes = _n_within(n_bytes * kept, config.limit)
        end_of_tokens = _n_within(n_tokens * kept, config.max_tokens or math.inf)
        end = min(end_of_bytes, end_of_tokens)
        duplicates = end - int(np.count_nonzero(kept[:end]))
        kept[end:] = False
        return cls(parts, table, kept, duplicates, is_limited=end < len(kept))

    def total(self, column: str) -> int:
        """Return the sum of a column of the table, over the documents kept."""
        return int(self.table[column][self.kept].sum(dtype=np.int64))

    def tokens(self, split: str, dtype: np.dtype) -> Iterator[np.ndarray]:
        """Yield the tokens of each document of a split, in order."""
        start = 0
        for part in self.parts:
            lengths = part.documents()[f"{split}_tokens"]
            kept = self.kept[start : start + len(lengths)]
            start += len(lengths)
            ends = np.cumsum(lengths, dtype=np.int64)
            documents = np.split(part.tokens(split, dtype), ends[:-1])
            yield from compress(documents, kept & (lengths > 0))


def _n_within(sizes: np.ndarray, limit: float) -> int:
    """Return the number of first documents whose sizes add up to the limit at most."""
    sums = np.cumsum(sizes, dtype=np.int64)
    return int(np.searchsorted(sums, limit, side="right"))
