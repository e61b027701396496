"""What counting alone achieves on a corpus: unigram and bigram cross-entropies."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

MAX_TRAIN_TOKENS = 50_000_000
MAX_VAL_TOKENS = 10_000_000


@dataclass(frozen=True)
class NgramBaseline:
    """Cross-entropies on the validation tokens, in nats per token, of models counted on training tokens.

    A language model that does not beat `bigram` has learned nothing but frequencies of pairs.
    """

    unigram: float
    bigram: float
    train_tokens: int
    val_tokens: int


class BigramModel:
    """p(b | a) = max(c(a, b) - D, 0) / c(a) + D n(a) / c(a) p(b),   p(b) = (c(b) + 1) / (N + V).

    Interpolated absolute discounting (Ney, Essen and Kneser, 1994) on an add-one unigram: c counts, n(a) is the
    number of different successors of a, D = n1 / (n1 + 2 n2) with n1, n2 the numbers of pairs seen once and twice.
    After a context never seen, p(b | a) = p(b).

    Args:
        vocab_size: V, ids lie below it
        eot: id of the end-of-text token, which stands before the first token of each stream
    """

    def __init__(self, vocab_size: int, eot: int) -> None:
        self.vocab_size, self.eot = vocab_size, eot

    def fit(self, streams: Iterable[np.ndarray]) -> "BigramModel":
        """Count streams of ids, each starting with a document."""
        codes = counts = np.empty(0, dtype=np.int64)  # pairs a V + b in order, and how often each was seen
        for ids in streams:
            for start in range(0, ids.size, 1 << 23):  # bounds the memory
                before = self.eot if start == 0 else int(ids[start - 1])
                found, often = np.unique(self._pairs(ids[start : start + (1 << 23)], before), return_counts=True)
                codes, where = np.unique(np.concatenate((codes, found)), return_inverse=True)
                counts = np.bincount(where, np.concatenate((counts, often))).astype(np.int64)  # exact below 2^53
        self._codes, self._counts, self.tokens = codes, counts, int(counts.sum())
        self._context, self._unigram = (
            np.bincount(ends, counts, self.vocab_size).astype(np.int64) for ends in np.divmod(codes, self.vocab_size)
        )
        self._successors = np.bincount(codes // self.vocab_size, minlength=self.vocab_size)
        once, twice = int((counts == 1).sum()), int((counts == 2).sum())
        # A corpus so small that no pair occurs once leaves the usual estimate undefined; any D in (0, 1) will do.
        self.discount = once / (once + 2 * twice) if once and twice else 0.5
        return self

    def cross_entropy(self, streams: Iterable[np.ndarray]) -> tuple[float, float, int]:
        """Mean negative log-probability of the streams, in nats: unigram, bigram, number of tokens."""
        unigram = bigram = 0.0
        tokens = 0
        for ids in streams:
            codes = self._pairs(ids, self.eot)
            unigram -= float(np.log(self.unigram(ids)).sum())
            bigram -= float(np.log(self.bigram(codes // self.vocab_size, ids)).sum())
            tokens += ids.size
        return unigram / tokens, bigram / tokens, tokens

    def unigram(self, ids: np.ndarray) -> np.ndarray:
        """p(b) of each id, float64."""
        return np.asarray((self._unigram[ids] + 1) / (self.tokens + self.vocab_size))

    def bigram(self, contexts: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """p(b | a) of each pair, float64, never 0."""
        codes = contexts.astype(np.int64) * self.vocab_size + ids
        at = np.minimum(np.searchsorted(self._codes, codes), self._codes.size - 1)
        counts = np.where(self._codes[at] == codes, self._counts[at], 0)
        seen = self._context[contexts]
        safe = np.maximum(seen, 1)
        rest = np.where(seen > 0, self.discount * self._successors[contexts] / safe, 1.0)
        return np.asarray(np.maximum(counts - self.discount, 0.0) / safe + rest * self.unigram(ids))

    def _pairs(self, ids: np.ndarray, before: int) -> np.ndarray:
        wide = ids.astype(np.int64)
        return np.concatenate(([before], wide[:-1])) * self.vocab_size + wide


def ngram_baseline(train: Iterable[np.ndarray], val: Iterable[np.ndarray], vocab_size: int, eot: int) -> NgramBaseline:
    """Count the training streams and score the validation streams; see `BigramModel`."""
    model = BigramModel(vocab_size, eot).fit(_first(train, MAX_TRAIN_TOKENS))
    unigram, bigram, tokens = model.cross_entropy(_first(val, MAX_VAL_TOKENS))
    return NgramBaseline(unigram, bigram, model.tokens, tokens)


def _first(streams: Iterable[np.ndarray], limit: int) -> Iterable[np.ndarray]:
    for ids in streams:
        if limit <= 0:
            return
        yield ids[:limit]
        limit -= min(limit, ids.size)
