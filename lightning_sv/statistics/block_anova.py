"""Differences of two arms under loss = arm + seed + residual, with one residual variance.

The arms of one model at one budget, trained on the same seeds, are a randomized block design whose
blocks are the seeds (R. A. Fisher, The Design of Experiments, 1935). Three pairs alone leave 2
degrees of freedom and Student's quantile is 4.30; fifteen arms of three seeds leave 28 and it is
2.05. Seeds are fixed effects, so that the t distribution is exact even if an arm lacks a seed, and
nothing is assumed about the scatter of seeds.
"""

import math
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import fdtrc

from lightning_sv.errors import NotTestableError
from lightning_sv.statistics.paired import PairedDifference, paired_difference

#: p value, times the number of arms, below which an arm scatters more than the others and is not
#: pooled
UNEQUAL = 0.05
#: with this many pairs or fewer, no test notices an arm that scatters three times as much in most
#: cases
FEW_PAIRS = 3

#: arm -> seed -> loss, nats per token
Losses = Mapping[Hashable, Mapping[int, float]]


class Contrast(NamedTuple):
    """A difference of two arms of a block model.

    Attributes:
        mean: A - B, nats per token
        relative_variance: its variance over that of one run; 2 / n for n pairs alone
    """

    mean: float
    relative_variance: float


class BlockModel:
    """The least-squares fit of loss = arm + seed + residual to finite losses."""

    def __init__(self, losses: Losses):
        self.losses = losses
        self.arms = list(losses)
        design = _design(losses)
        y = np.concatenate([list(row.values()) for row in losses.values()])

        # the design has one redundant column per connected part; differences are those of the
        # shortest solution
        self._inverse: NDArray[np.floating] = np.linalg.pinv(design)
        self._effects = self._inverse @ y
        residuals = y - design @ self._effects
        # nats per token: bound on the rounding errors of float64 in a sum of a few thousand terms
        self._rounding = 1e-12 * math.sqrt(float(y @ y))
        #: degrees of freedom of the residual variance
        self.df = len(y) - int(np.linalg.matrix_rank(design))
        squares = float(residuals @ residuals)
        #: sum of squares of the residuals; 0 if they are rounding errors
        self.squares = squares if squares >= self._rounding**2 else 0.0

    @property
    def variance(self) -> float:
        """Residual variance of one run, (nats per token)²; 0 without degrees of freedom."""
        return self.squares / self.df if self.df else 0.0

    @property
    def replicated(self) -> list[Hashable]:
        """Arms of two or more runs; only they scatter."""
        return [arm for arm in self.arms if len(self.losses[arm]) > 1]

    def without(self, arm: Hashable) -> "BlockModel":
        """Return the fit to the other arms."""
        return BlockModel({other: row for other, row in self.losses.items() if other != arm})

    def p_scatters_more(self, arm: Hashable) -> float:
        """P value against an arm whose variance is that of the others, small if it is larger.

        F = ((SS - SS_others) / (df - df_others)) / (SS_others / df_others), exact under one
        variance.
        """
        others = self.without(arm)
        own_df = self.df - others.df
        is_testable = own_df >= 1 and others.df >= 1
        if not is_testable or self.squares == 0.0:
            return 1.0
        if others.squares == 0.0:  # all scatter is that of this arm
            return 0.0
        own_squares = max(self.squares - others.squares, 0.0)
        own_variance = own_squares / own_df
        return float(fdtrc(own_df, others.df, own_variance / others.variance))  # upper tail

    def contrast(self, a: Hashable, b: Hashable) -> Contrast:
        """Return A - B of two arms that share a seed."""
        weights = np.zeros(len(self._effects))
        weights[self.arms.index(a)] += 1.0
        weights[self.arms.index(b)] -= 1.0
        mean = float(weights @ self._effects)
        if abs(mean) < self._rounding:  # copies would differ by the last digit of the solver
            mean = 0.0
        row = weights @ self._inverse
        return Contrast(mean, float(row @ row))


def _design(losses: Losses) -> NDArray[np.float64]:
    """Return a row per loss, with ones in the columns of its arm and of its seed."""
    seeds = sorted(set[int]().union(*losses.values()))
    rows = []
    for place, row in enumerate(losses.values()):
        for seed in row:
            indicators = np.zeros(len(losses) + len(seeds))
            indicators[place] = 1.0
            indicators[len(losses) + seeds.index(seed)] = 1.0
            rows.append(indicators)
    return np.stack(rows)


class BlockDesign:
    """Arms with one residual variance, without those that scatter more than the others.

    Arms are left out one at a time, the one with the smallest p value first, while this p value
    times the number of arms (Bonferroni) is below `UNEQUAL`.
    """

    def __init__(self, losses: Losses):
        self._losses = losses
        self.pooled = BlockModel(losses)
        #: arm that is not pooled -> its p value, times the number of arms
        self.left_out: dict[Hashable, float] = {}
        while self._pools_several_arms:  # two arms have one scatter, that of their differences
            p_values = {arm: self.pooled.p_scatters_more(arm) for arm in self.pooled.replicated}
            arm = min(p_values, key=lambda arm: p_values[arm])
            p = p_values[arm] * len(p_values)
            if p >= UNEQUAL:
                break
            self.left_out[arm] = p
            self.pooled = self.pooled.without(arm)

    def difference(self, a: Hashable, b: Hashable, confidence: float = 0.95) -> PairedDifference:
        """A - B with the scatter of the pooled arms, or of its pairs if an arm is left out.

        An arm of one run has no interval, because its own deviation is unknown.

        Raises:
            NotTestableError: the two arms share no seed
        """
        alone = self._pairs_alone(a, b, confidence)
        p = min(self.left_out.get(a, 1.0), self.left_out.get(b, 1.0))
        if p < UNEQUAL:
            reason = f"an arm scatters more than {len(self.pooled.replicated)} others"
            scatter = f"their own scatter, because {reason} (F test, p {p:.2g})"
            return replace(alone, scatter=scatter)

        has_single_run = min(len(self._losses[a]), len(self._losses[b])) == 1
        if has_single_run or self.pooled.df == 0:
            return alone
        if alone.mean == alone.se == 0.0:
            return replace(alone, scatter="their own scatter: the losses are equal")
        pooled = self._pooled_difference(a, b, alone)
        are_few = 1 < alone.n <= FEW_PAIRS
        if are_few and self._pools_several_arms:  # readers see what the pooling assumes
            return replace(pooled, alone=alone)
        return pooled

    @property
    def _pools_several_arms(self) -> bool:
        """True if the scatter is not that of the two compared arms alone."""
        return len(self.pooled.replicated) > 2

    def _pooled_difference(
        self, a: Hashable, b: Hashable, alone: PairedDifference
    ) -> PairedDifference:
        """Return the difference with the scatter of the pooled arms, given that by its pairs."""
        contrast = self.pooled.contrast(a, b)
        se = math.sqrt(self.pooled.variance * contrast.relative_variance)
        pooled = PairedDifference.student(
            contrast.mean, se, n=alone.n, confidence=alone.confidence, df=self.pooled.df
        )
        return replace(pooled, scatter=self._pooled_arms())

    def _pairs_alone(self, a: Hashable, b: Hashable, confidence: float) -> PairedDifference:
        """A - B over the seeds of both.

        Raises:
            NotTestableError: there is no such seed
        """
        losses_a = self._losses[a]
        losses_b = self._losses[b]
        shared = sorted(losses_a.keys() & losses_b.keys())
        if not shared:
            raise NotTestableError("the two arms share no seed.")
        values_a = [losses_a[seed] for seed in shared]
        values_b = [losses_b[seed] for seed in shared]
        return paired_difference(values_a, values_b, confidence)

    def _pooled_arms(self) -> str:
        """Describe the arms that share their scatter; empty if they are two alone."""
        if not self._pools_several_arms:
            return ""
        n_arms = len(self.pooled.replicated)
        total = f" of {n_arms + len(self.left_out)}" if self.left_out else ""
        return f"scatter of {n_arms}{total} arms, {self.pooled.df} degrees of freedom"
