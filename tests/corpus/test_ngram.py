"""N-gram baselines against a transcription of the formula, pair by pair."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from lightning_sv.corpus.ngram import BigramModel, ngram_baseline

V, EOT = 11, 0


@pytest.fixture
def streams() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    weights = np.arange(1, V, dtype=float) ** -1.5
    draw = rng.choice(np.arange(V - 1), size=(3, 150), p=weights / weights.sum())  # token 10 is never seen
    return [row.astype(np.uint16) for row in draw]


def _brute_force(train: list[np.ndarray], val: list[np.ndarray]) -> tuple[float, float]:
    unigrams: Counter[int] = Counter()
    pairs: Counter[tuple[int, int]] = Counter()
    for stream in train:
        before = EOT
        for token in stream.tolist():
            unigrams[token] += 1
            pairs[before, token] += 1
            before = token
    successors: dict[int, int] = defaultdict(int)
    contexts: dict[int, int] = defaultdict(int)
    for (a, _), count in pairs.items():
        successors[a] += 1
        contexts[a] += count
    n1, n2 = (sum(c == k for c in pairs.values()) for k in (1, 2))
    d = n1 / (n1 + 2 * n2)
    total = sum(unigrams.values())
    uni = bi = n = 0.0
    for stream in val:
        before = EOT
        for token in stream.tolist():
            p = (unigrams[token] + 1) / (total + V)
            uni -= math.log(p)
            if contexts[before]:
                discounted = max(pairs[before, token] - d, 0)
                p = (discounted + d * successors[before] * p) / contexts[before]
            bi -= math.log(p)
            n += 1
            before = token
    return uni / n, bi / n


def test_agrees_with_brute_force(streams: list[np.ndarray]) -> None:
    val = [np.array([3, 10, 4, 0, 1, 1], dtype=np.uint16), streams[2]]
    result = ngram_baseline(streams[:2], val, V, EOT)
    assert (result.unigram, result.bigram) == pytest.approx(_brute_force(streams[:2], val), rel=1e-12)
    assert (result.train_tokens, result.val_tokens) == (300, 156)


def test_probabilities_sum_to_one(streams: list[np.ndarray]) -> None:
    model = BigramModel(V, EOT).fit(streams)
    every = np.arange(V)
    assert model.unigram(every).sum() == pytest.approx(1)
    for context in every:  # also the one never seen
        p = model.bigram(np.full(V, context), every)
        assert (p > 0).all() and p.sum() == pytest.approx(1)


def test_a_cycle_is_learned_by_pairs_and_not_by_single_tokens() -> None:
    cycle = np.tile(np.arange(V), 200).astype(np.uint16)
    result = ngram_baseline([cycle], [cycle], V, EOT)
    assert result.unigram == pytest.approx(math.log(V), abs=1e-3)
    assert result.bigram < 0.05


def test_counts_stop_at_the_limit(streams: list[np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_sv.corpus.ngram.MAX_TRAIN_TOKENS", 200)
    assert ngram_baseline(streams, streams, V, EOT).train_tokens == 200
