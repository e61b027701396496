"""Differences of two arms under loss = arm + seed + residual, with one residual variance of all runs of a design.

The arms of one model at one budget, trained on the same seeds, are a randomized block design whose blocks are the
seeds (R. A. Fisher, The Design of Experiments, 1935). Three pairs alone leave 2 degrees of freedom and Student's
quantile is 4.30; fifteen arms of three seeds leave 28 and it is 2.05. Seeds are fixed effects, so that the t
distribution is exact even if an arm lacks a seed, and nothing is assumed about the scatter of seeds.
"""

import math
from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.special import fdtrc

from lightning_sv.analysis.paired import PairedDifference, paired_difference
from lightning_sv.errors import NotTestableError

#: p value below which the scatter of arms counts as unequal, so that it is not pooled
UNEQUAL = 0.05


class BlockDesign:
    """The least-squares fit of loss = arm + seed + residual to finite losses arm -> seed -> nats per token."""

    def __init__(self, losses: Mapping[Hashable, Mapping[int, float]]):
        cells = [(arm, seed, loss) for arm, row in losses.items() for seed, loss in row.items()]
        self._losses = losses
        self._arms = list(losses)
        seeds = sorted({seed for _, seed, _ in cells})
        design = np.zeros((len(cells), len(self._arms) + len(seeds)))
        for i, (arm, seed, _) in enumerate(cells):
            design[i, self._arms.index(arm)] = design[i, len(self._arms) + seeds.index(seed)] = 1.0
        y = np.array([loss for _, _, loss in cells])
        # the design has one redundant column per connected part; differences are those of the shortest solution
        self._inverse: NDArray[np.floating] = np.linalg.pinv(design)
        self._effects = self._inverse @ y
        self._known = self._inverse @ design
        self._residuals = y - design @ self._effects
        self._arm_of_cell = np.array([self._arms.index(arm) for arm, _, _ in cells])
        #: degrees of freedom of the residual variance
        self.df = len(cells) - int(np.linalg.matrix_rank(design))
        #: sum of squares of the residuals; 0 if they are rounding errors
        self.squares = float(self._residuals @ self._residuals)
        # nats per token: bound on the rounding errors of float64 in a sum of a few thousand terms
        self._rounding = 1e-12 * math.sqrt(float(y @ y))
        if self.squares < self._rounding**2:
            self.squares = 0.0
        #: arms of two or more runs
        self.scattered = [arm for arm in self._arms if len(losses[arm]) > 1]

    @property
    def variance(self) -> float | None:
        """Residual variance of one run, (nats per token)²; None without degrees of freedom."""
        return self.squares / self.df if self.df else None

    @cached_property
    def p_equal(self) -> float:
        """P value of Bartlett's test (1937) on the residuals, against one variance for all arms; 1 for two arms.

        Residuals of one fit are correlated, so that the test is lenient if there are few arms.
        """
        rows = [self._residuals[self._arm_of_cell == self._arms.index(arm)] for arm in self.scattered]
        if len(rows) < 3 or not self.squares:
            return 1.0
        variances = [row.var(ddof=1) for row in rows]
        if min(variances) < 1e-12 * max(variances):
            return 0.0  # two runs are copies
        from scipy.stats import bartlett  # a second to import

        return float(bartlett(*rows).pvalue)

    def difference(self, a: Hashable, b: Hashable, confidence: float = 0.95) -> PairedDifference:
        """A - B with the scatter of the design, or with that of the pairs alone.

        The pairs have their own scatter if Bartlett's test rejects one variance for all arms, or if an F test shows
        that they scatter more than the rest. An arm of one run has no interval, because its own deviation is unknown.

        Raises:
            NotTestableError: no chain of shared seeds connects the two arms
        """
        weights = np.zeros(len(self._effects))
        weights[self._arms.index(a)] += 1.0
        weights[self._arms.index(b)] -= 1.0
        if not np.allclose(weights @ self._known, weights, atol=1e-8):
            raise NotTestableError(f"{a} and {b} share no seed, nor are they connected by other arms' seeds.")
        shared = sorted(self._losses[a].keys() & self._losses[b].keys())
        ours, theirs = ([self._losses[arm][seed] for seed in shared] for arm in (a, b))
        few = min(len(self._losses[arm]) for arm in (a, b)) < 2
        why = self._why_alone(np.subtract(ours, theirs))
        if shared and (few or why):
            return replace(paired_difference(theirs, ours, confidence), scatter=why)
        rows, mean, variance = weights @ self._inverse, float(weights @ self._effects), self.variance or 0.0
        if abs(mean) < self._rounding:
            mean = 0.0  # copies would differ by the last digit of the solver
        se = None if few or not self.df else math.sqrt(variance * float(rows @ rows))
        n_arms = len(self.scattered)
        words = f"scatter of {n_arms} arms, {self.df} degrees of freedom" if n_arms > 2 and se is not None else ""
        found = PairedDifference(mean, None, None, se, len(shared), confidence, self.df, words, math.sqrt(2 * variance))
        return found.at(confidence)

    def _why_alone(self, pairs: NDArray[np.floating]) -> str:
        """Return why pairs have their own scatter; empty if they have that of the design."""
        df, rest = len(pairs) - 1, self.df - len(pairs) + 1
        if df < 1 or rest < 1 or not self.squares:
            return ""
        n_arms = len(self.scattered)
        if self.p_equal < UNEQUAL:
            return f"their own scatter: that of the {n_arms} arms is unequal (Bartlett, p {self.p_equal:.2g})"
        if not pairs.any():
            return "their own scatter: the losses are equal"
        own = float(((pairs - pairs.mean()) ** 2).sum() / 2)
        others = max(self.squares - own, 0.0) / rest
        if own > 0 and (others == 0 or float(fdtrc(df, rest, own / df / others)) < UNEQUAL):
            return f"their own scatter, larger than that of {n_arms} arms"
        return ""
