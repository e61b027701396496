"""Paired differences of runs that share a seed, and tokens to reach a loss.

Runs of one seed share their initial matrices and batches. docs/verdicts.md has the share of the
variance that this cancels. All functions are pure.
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
    """mean +- t(confidence, df) * se of d = A - B.

    Attributes:
        mean: estimate of the difference, in the unit of the data
        low: lower end of the interval; NaN if the scatter is unknown, as `high` and `se`
        n: number of pairs
        confidence: coverage of the interval, e.g. 0.95
        df: degrees of freedom of the scatter; n - 1 if the scatter is that of these pairs alone
        scatter: source of the scatter in words, if it is pooled over more arms or pooling was
            rejected
        alone: difference with the scatter of its pairs alone, if it is pooled and the pairs are too
            few to test that
    """

    mean: float
    low: float
    high: float
    se: float
    n: int
    confidence: float
    df: int
    scatter: str = ""
    alone: "PairedDifference | None" = None

    @classmethod
    def student(
        cls, mean: float, se: float, *, n: int, confidence: float, df: int
    ) -> "PairedDifference":
        """Return a difference with Student's interval; without one if `se` is NaN."""
        half = float(stdtrit(df, 0.5 + confidence / 2)) * se
        return cls(mean, mean - half, mean + half, se, n, confidence, df)

    @property
    def has_interval(self) -> bool:
        """If True, the scatter is known."""
        return not math.isnan(self.low)

    @property
    def own_interval(self) -> tuple[float, float]:
        """Interval by the scatter of its pairs alone, next to a pooled one; otherwise NaN."""
        if self.alone is None:
            return math.nan, math.nan
        return self.alone.low, self.alone.high

    @property
    def smallest_resolvable(self) -> float:
        """Half of the interval: the smallest mean that this scatter and n resolve."""
        return (self.high - self.low) / 2

    def negated(self) -> "PairedDifference":
        """Return B - A with its interval."""
        alone = self.alone
        if alone is not None:
            alone = alone.negated()
        return replace(self, mean=-self.mean, low=-self.high, high=-self.low, alone=alone)

    def exponentiated(self) -> "PairedDifference":
        """Return the ratio with its interval, if this is the difference of logarithms."""
        low = math.exp(self.low)
        return replace(self, mean=math.exp(self.mean), low=low, high=math.exp(self.high))

    def p_below(self, bound: float = 0.0) -> float:
        """One-sided p value against d >= bound: small if d is below; 1 for one pair."""
        return self._p_negative(self.mean - bound)

    def p_above(self, bound: float = 0.0) -> float:
        """One-sided p value against d <= bound: small if d is above; 1 for one pair."""
        return self._p_negative(bound - self.mean)

    def p_within(self, margin: float) -> float:
        """P value of two one-sided tests of equivalence (Schuirmann 1987): small if within."""
        return max(self.p_below(margin), self.p_above(-margin))

    def _p_negative(self, excess: float) -> float:
        """P(T <= excess / se) of Student's T: small if the excess over a bound is negative."""
        if math.isnan(self.se):
            return 1.0
        if self.se == 0.0:
            return float(excess >= 0)
        return float(stdtr(self.df, excess / self.se))


@dataclass(frozen=True)
class TokenEfficiency:
    """factor = exp(mean(log(tokens_A / tokens_B))): above 1, B needs fewer tokens than A.

    Attributes:
        tokens_a: tokens at which A reached the target of each pair; empty without a factor
        factor: geometric mean over the pairs; NaN if it is unknown
        low: lower end of the interval of the factor; NaN without a factor or for one pair
        why_not: why the runs have no factor
    """

    tokens_a: tuple[float, ...]
    tokens_b: tuple[float, ...]
    factor: float = math.nan
    low: float = math.nan
    high: float = math.nan
    why_not: str = ""

    @property
    def n(self) -> int:
        """Number of pairs."""
        return len(self.tokens_a)

    @property
    def has_factor(self) -> bool:
        """If True, the runs have losses before the end, and the target is below the first."""
        return not math.isnan(self.factor)

    @property
    def has_interval(self) -> bool:
        """If True, there is a factor of several pairs."""
        return not math.isnan(self.low)


class PairedCurve(NamedTuple):
    """B - A of n pairs against tokens; `low` and `high` are NaN for one pair."""

    tokens: NDArray[np.int64]  # (N,)
    mean: NDArray[np.float64]  # (N,)
    low: NDArray[np.float64]  # (N,)
    high: NDArray[np.float64]  # (N,)
    n: int


def welch_df(variances: ArrayLike, dfs: ArrayLike) -> int:
    """floor((Σ v)² / Σ v²/df), the degrees of freedom of a sum with independent variances v."""
    v = np.asarray(variances, dtype=np.float64)
    shares = v / v.sum()
    df = 1 / float((shares**2 / np.asarray(dfs)).sum())
    return int(df + 1e-9)  # not 7 for a rounded 8


def percent(confidence: float) -> str:
    """Return a coverage as text: 95%, 98.75%."""
    return f"{100 * confidence:.4g}%"


def finite_differences(a: ArrayLike, b: ArrayLike) -> NDArray[np.float64]:
    """Subtract numbers in equal order: a - b.

    Raises:
        NotTestableError: a number is not finite
    """
    first = np.asarray(a, dtype=np.float64)
    second = np.asarray(b, dtype=np.float64)
    assert first.size and first.shape == second.shape, (first, second)
    if not np.isfinite([first, second]).all():
        found = f"A {first.tolist()} and B {second.tolist()}"
        raise NotTestableError(
            f"A paired difference needs finite numbers, got {found}; leave out runs that diverged."
        )
    difference: NDArray[np.float64] = first - second
    return difference


def paired_difference(a: ArrayLike, b: ArrayLike, confidence: float = 0.95) -> PairedDifference:
    """mean(a - b) of numbers (n,), one per seed in equal order, with Student's t interval.

    Raises:
        NotTestableError: a number is not finite
    """
    difference = finite_differences(a, b)
    assert difference.ndim == 1, difference
    mean = float(difference.mean())
    n = difference.size
    se = math.nan
    if n > 1:
        se = float(difference.std(ddof=1)) / math.sqrt(n)
    return PairedDifference.student(mean, se, n=n, confidence=confidence, df=n - 1)


def tokens_to_reach(tokens: ArrayLike, losses: ArrayLike, target: float) -> float | None:
    """min{t : loss(t) <= target}, losses (N,) linear between tokens (N,); None if never reached."""
    t = np.asarray(tokens, dtype=np.float64)
    loss = np.asarray(losses, dtype=np.float64)
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
    a: Sequence[Curve], b: Sequence[Curve], confidence: float = 0.95
) -> TokenEfficiency:
    """tokens_A / tokens_B to a target loss: geometric mean over the pairs.

    Both arms have the same seeds in the same order. The target of a pair is the higher one of both
    final losses, which both reach.
    """
    targets = [max(float(x.values[-1]), float(y.values[-1])) for x, y in zip(a, b, strict=True)]
    why_not = _why_no_efficiency(a, b, targets)
    if why_not:
        return TokenEfficiency((), (), why_not=why_not)
    reached_a = _tokens_of_pairs(a, targets)
    reached_b = _tokens_of_pairs(b, targets)
    ratio = paired_difference(np.log(reached_a), np.log(reached_b), confidence).exponentiated()
    return TokenEfficiency(reached_a, reached_b, ratio.mean, ratio.low, ratio.high)


def _why_no_efficiency(a: Sequence[Curve], b: Sequence[Curve], targets: Sequence[float]) -> str:
    """Return why runs have no ratio of tokens; empty if they have one."""
    curves = [*a, *b]
    if min(curve.tokens.size for curve in curves) < 2:
        return "a run has its final loss alone, not those before it"
    starts = np.array([curve.values[0] for curve in curves])
    ends = np.array([curve.values[-1] for curve in curves])
    if not np.isfinite(ends).all():
        return "a run diverged"
    targets_of_both = [*targets, *targets]
    if (starts <= targets_of_both).any():
        return "a run reached the target before its first validation"
    return ""


def _tokens_of_pairs(curves: Sequence[Curve], targets: Sequence[float]) -> tuple[float, ...]:
    """Return the tokens at which each run reaches its target, which all runs do."""
    reached = []
    for curve, target in zip(curves, targets, strict=True):
        tokens = tokens_to_reach(*curve, target)
        assert tokens is not None  # the target is at or above the final loss
        reached.append(tokens)
    return tuple(reached)


def on_one_grid(curves: Sequence[Curve]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Interpolate curves linearly to the evaluations of the one that has the fewest.

    Returns:
        tokens (N,) and values (runs, N)

    Raises:
        NotTestableError: no tokens are covered by all curves
    """
    first = max(curve.tokens[0] for curve in curves)
    last = min(curve.tokens[-1] for curve in curves)
    if first > last:
        apart = f"one has its first validation after {first:,} tokens, a different one ends at"
        raise NotTestableError(
            f"The runs share no part of training: {apart} {last:,}; compare runs of one budget."
        )
    shared = [tokens[(first <= tokens) & (tokens <= last)] for tokens, _ in curves]
    tokens = min(filter(len, shared), key=len)
    return tokens, np.stack([np.interp(tokens, *curve) for curve in curves])


def paired_curve(a: Sequence[Curve], b: Sequence[Curve]) -> PairedCurve:
    """B - A on one grid of evaluations, with pointwise 95% intervals of Student's t.

    Raises:
        NotTestableError: the runs share no tokens, or a loss is not finite
    """
    tokens, values = on_one_grid([*a, *b])
    n = len(a)
    differences = [paired_difference(losses[n:], losses[:n]) for losses in values.T]
    mean = np.array([d.mean for d in differences])
    low = np.array([d.low for d in differences])
    high = np.array([d.high for d in differences])
    return PairedCurve(tokens, mean, low, high, n)
