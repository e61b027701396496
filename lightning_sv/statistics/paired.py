"""Paired differences d = B - A of runs that share a seed: mean, interval, p values; and tokens to reach a loss.

Runs of one seed share their initial matrices and batches. docs/verdicts.md has the share of the variance that this
cancels. All functions are pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtr, stdtrit

from lightning_sv.errors import NotTestableError
from lightning_sv.runs.events import Curve


@dataclass(frozen=True)
class PairedDifference:
    """mean +- t(confidence, df) * se of d = B - A.

    Attributes:
        mean: estimate of the difference, in the unit of the data
        low: lower end of the interval; None for one pair, as `high` and `se`
        n: number of pairs
        confidence: coverage of the interval, e.g. 0.95
        df: degrees of freedom of the scatter; n - 1 if the scatter is that of these pairs alone
        scatter: source of the scatter in words, if it is pooled over more arms or pooling was rejected
        sd: standard deviation of the difference of one pair, if it is not se sqrt(n), because an arm has more runs
        alone: difference with the scatter of its pairs alone, if it is pooled and the pairs are too few to test that
    """

    mean: float
    low: float | None
    high: float | None
    se: float | None
    n: int
    confidence: float
    df: int
    scatter: str = ""
    sd: float | None = None
    alone: "PairedDifference | None" = None

    @property
    def smallest_resolvable(self) -> float | None:
        """Half of the interval: the smallest mean that this scatter and n resolve."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    def at(self, confidence: float) -> "PairedDifference":
        """Return the same difference with an interval of this coverage."""
        if self.se is None:
            return replace(self, confidence=confidence)
        half = float(stdtrit(self.df, 0.5 + confidence / 2)) * self.se
        alone = self.alone and self.alone.at(confidence)
        return replace(self, low=self.mean - half, high=self.mean + half, confidence=confidence, alone=alone)

    def p_below(self, bound: float = 0.0) -> float:
        """One-sided p value against d >= bound: small if d is below; 1 for one pair."""
        return self._p(self.mean - bound)

    def p_above(self, bound: float = 0.0) -> float:
        """One-sided p value against d <= bound: small if d is above; 1 for one pair."""
        return self._p(bound - self.mean)

    def p_within(self, margin: float) -> float:
        """P value of equivalence by two one-sided tests (Schuirmann 1987): small if |d| < margin."""
        return max(self.p_below(margin), self.p_above(-margin))

    def _p(self, distance: float) -> float:
        if self.se is None:
            return 1.0
        if self.se == 0.0:
            return 0.0 if distance < 0 else 1.0
        return float(stdtr(self.df, distance / self.se))


@dataclass(frozen=True)
class TokenEfficiency:
    """factor = exp(mean(log(tokens_A / tokens_B))): above 1, B needs fewer tokens than A.

    Attributes:
        tokens_a: tokens at which A reached the target of each pair; None if it never did
        factor: geometric mean over the pairs; None unless every pair reached its target, because a mean over the
            successful pairs alone is biased towards B
        low: lower end of the interval of the factor; None without a factor or for one pair
        why_not: why the runs have no factor; then all tokens are None
    """

    tokens_a: tuple[float | None, ...]
    tokens_b: tuple[float | None, ...]
    factor: float | None
    low: float | None
    high: float | None
    why_not: str = ""

    @property
    def n(self) -> int:
        """Number of pairs."""
        return len(self.tokens_a)


class PairedCurve(NamedTuple):
    """B - A of n pairs against tokens; `low` and `high` are NaN for one pair."""

    tokens: NDArray[np.int64]  # (N,)
    mean: NDArray[np.float64]  # (N,)
    low: NDArray[np.float64]  # (N,)
    high: NDArray[np.float64]  # (N,)
    n: int


def percent(confidence: float) -> str:
    """Return a coverage as text: 95%, 98.75%."""
    return f"{100 * confidence:.4g}%"


def paired_difference(a: ArrayLike, b: ArrayLike, confidence: float = 0.95) -> PairedDifference:
    """mean(b - a) of finite numbers (n,), one per seed in equal order, with Student's t interval over the pairs."""
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    assert first.ndim == 1 and first.shape == second.shape and first.size, (first.shape, second.shape)
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        found = f"A {first.tolist()} and B {second.tolist()}"
        raise NotTestableError(f"A paired difference needs finite numbers, got {found}; leave out runs that diverged.")
    difference = second - first
    mean, n = float(difference.mean()), difference.size
    se = None if n == 1 else float(difference.std(ddof=1)) / math.sqrt(n)
    return PairedDifference(mean, None, None, se, n, confidence, n - 1).at(confidence)


def tokens_to_reach(tokens: ArrayLike, losses: ArrayLike, target: float) -> float | None:
    """min{t : loss(t) <= target} with losses (N,) linear between evaluations at tokens (N,); None if never reached."""
    t, loss = np.asarray(tokens, dtype=np.float64), np.asarray(losses, dtype=np.float64)
    assert t.shape == loss.shape and t.ndim == 1, (t.shape, loss.shape)
    below = np.flatnonzero(loss <= target)
    if below.size == 0:
        return None
    i = int(below[0])
    if i == 0 or not math.isfinite(loss[i - 1]):
        return float(t[i])  # no earlier evaluation to interpolate from
    share = (loss[i - 1] - target) / (loss[i - 1] - loss[i])
    return float(t[i - 1] + share * (t[i] - t[i - 1]))


def token_efficiency(
    a: Sequence[Curve], b: Sequence[Curve], confidence: float = 0.95, *, to_higher: bool = False
) -> TokenEfficiency:
    """tokens_A / tokens_B to a target loss: geometric mean over the pairs, interval from logarithms.

    Both arms have the same seeds in the same order. The target of a pair is the last value of A, or with `to_higher`
    the higher one of both final losses, which both reach.
    """
    ends = [(float(x.values[-1]), float(y.values[-1])) for x, y in zip(a, b, strict=True)]
    targets = [max(pair) if to_higher else pair[0] for pair in ends]
    early = any(curve.values[0] <= target for of in (a, b) for curve, target in zip(of, targets, strict=True))
    for fails, why in (
        (min(curve.tokens.size for curve in (*a, *b)) < 2, "a run has its final loss alone, not those before it"),
        (not np.isfinite(ends).all(), "a run diverged"),
        (early, "a run reached the target before its first validation"),
    ):
        if fails:
            nothing = (None,) * len(a)
            return TokenEfficiency(nothing, nothing, None, None, None, why)
    reach_a, reach_b = (tuple(tokens_to_reach(*c, t) for c, t in zip(of, targets, strict=True)) for of in (a, b))
    known_a, known_b = ([x for x in reached if x is not None] for reached in (reach_a, reach_b))
    if len(known_a) < len(a) or len(known_b) < len(b):
        return TokenEfficiency(reach_a, reach_b, None, None, None)
    log = paired_difference(np.log(known_b), np.log(known_a), confidence)
    low, high = (None if end is None else math.exp(end) for end in (log.low, log.high))
    return TokenEfficiency(reach_a, reach_b, math.exp(log.mean), low, high)


def on_one_grid(curves: Sequence[Curve]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Interpolate curves linearly to the evaluations of the one that has the fewest: tokens (N,), values (runs, N).

    Raises:
        NotTestableError: no tokens are covered by all curves
    """
    first, last = max(c.tokens[0] for c in curves), min(c.tokens[-1] for c in curves)
    if first > last:
        apart = f"one has its first validation after {first:,} tokens, a different one ends at {last:,}"
        raise NotTestableError(f"The runs share no part of training: {apart}; compare runs of one budget.")
    grids = [c.tokens[(first <= c.tokens) & (c.tokens <= last)] for c in curves]
    tokens = min((grid for grid in grids if grid.size), key=len)
    return tokens, np.stack([np.interp(tokens, *c) for c in curves])


def paired_curve(a: Sequence[Curve], b: Sequence[Curve]) -> PairedCurve:
    """B - A on one grid of evaluations, with pointwise 95% intervals of Student's t.

    Raises:
        NotTestableError: the runs share no tokens, or no evaluation at which all values are finite
    """
    tokens, values = on_one_grid([*a, *b])
    finite = np.isfinite(values).all(axis=0)
    points = [paired_difference(column[: len(a)], column[len(a) :]) for column in values.T[finite]]
    if not points:
        raise NotTestableError("The runs share no finite evaluation; repair the runs that diverged.")
    mean, low, high = np.array([(p.mean, p.low, p.high) for p in points], dtype=np.float64).T  # None is NaN
    return PairedCurve(tokens[finite], mean, low, high, len(a))
