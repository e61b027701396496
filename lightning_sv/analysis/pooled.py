"""loss = arm + seed + residual over all runs of a family, with one residual variance: contrasts of two arms.

A family is the arms of one model at one budget, trained on the same seeds: a randomized block design, whose blocks
are the seeds (R. A. Fisher, The Design of Experiments, 1935). Three pairs alone leave 2 degrees of freedom for their
scatter, and Student's quantile is 4.30; fifteen arms of three seeds leave 28 for the same scatter, and it is 2.05.
Seeds are fixed effects: then the t distribution is exact also where some arm lacks some seed, and nothing is assumed
about the scatter of seeds, which is the smaller part here (0.3 of a run's variance at 3,000 steps).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import fdtrc, stdtr, stdtrit

#: the pooled variance is not that of a pair whose own scatter would be as large as this rarely
UNEQUAL = 0.05


@dataclass(frozen=True)
class Contrast:
    """An estimate of mean(A) - mean(B), and Student's t for it.

    Args:
        mean: the estimate, in the unit of the losses
        se: its standard error; None where nothing is left to estimate the scatter from
        df: degrees of freedom of the scatter
        n: seeds that both arms have
        pooled: whether the scatter is the family's; else that of these pairs alone
    """

    mean: float
    se: float | None
    df: int
    n: int
    pooled: bool

    def interval(self, confidence: float = 0.95) -> tuple[float, float] | None:
        """Mean +- t(confidence, df) se; None without a standard error."""
        if self.se is None:
            return None
        half = float(stdtrit(self.df, 0.5 + confidence / 2)) * self.se
        return self.mean - half, self.mean + half

    def p_below(self, margin: float = 0.0) -> float:
        """One-sided p value against mean(A) - mean(B) >= margin: small where A is below B + margin."""
        return self._p(self.mean - margin)

    def p_above(self, margin: float = 0.0) -> float:
        """One-sided p value against mean(A) - mean(B) <= margin: small where A is above B + margin."""
        return self._p(margin - self.mean)

    def p_within(self, margin: float) -> float:
        """P value of equivalence by two one-sided tests (Schuirmann 1987): small where |A - B| < margin."""
        return max(self.p_below(margin), self.p_above(-margin))

    def _p(self, distance: float) -> float:
        if self.se is None:
            return 1.0
        if self.se == 0.0:
            return 0.0 if distance < 0 else 1.0
        return float(stdtr(self.df, distance / self.se))


class Family:
    """The least-squares fit of loss = arm + seed + residual.

    Args:
        losses: arm -> seed -> final loss of its run, nats per token

    Raises:
        ValueError: no losses, or one that is not finite
    """

    def __init__(self, losses: Mapping[str, Mapping[int, float]]):
        cells = [(arm, seed, loss) for arm, of in losses.items() for seed, loss in of.items()]
        if not cells:
            raise ValueError("a family needs the losses of at least one run.")
        if diverged := [(arm, seed) for arm, seed, loss in cells if not math.isfinite(loss)]:
            arm, seed = diverged[0]
            raise ValueError(f"the loss of {arm}, seed {seed}, is not finite; leave that run out.")
        self._losses = losses
        self._arms = list(losses)
        seeds = sorted({seed for _, seed, _ in cells})
        design = np.zeros((len(cells), len(self._arms) + len(seeds)))
        for i, (arm, seed, _) in enumerate(cells):
            design[i, self._arms.index(arm)] = design[i, len(self._arms) + seeds.index(seed)] = 1.0
        y = np.array([loss for _, _, loss in cells])
        # one column too many for every connected part of the design: the shortest solution, and the same contrasts
        self._inverse: NDArray[np.floating] = np.linalg.pinv(design)
        self._effects = self._inverse @ y
        self._known = self._inverse @ design
        residuals = y - design @ self._effects
        #: degrees of freedom of the residual variance
        self.df = len(cells) - int(np.linalg.matrix_rank(design))
        #: sum of squares of the residuals
        self.squares = float(residuals @ residuals)

    @property
    def variance(self) -> float | None:
        """Residual variance of one run, (nats per token)²; None where no degrees of freedom are left."""
        return self.squares / self.df if self.df else None

    def contrast(self, a: str, b: str) -> Contrast:
        """Return A - B with the family's scatter, or with that of the pairs where theirs is larger.

        The pairs' own sum of squares is a part of the family's, so that its ratio to the rest has an F distribution
        where all arms scatter alike. Only pairs that scatter more fall back on themselves: where they scatter less,
        the family's interval is too wide at worst.

        Args:
            a: arm in question
            b: arm it is compared with

        Raises:
            ValueError: an arm that the family does not have, or two that no chain of shared seeds connects
        """
        for arm in (a, b):
            if arm not in self._losses:
                raise ValueError(f"the family has no arm {arm!r}; it has {', '.join(self._arms)}.")
        weights = np.zeros(len(self._effects))
        weights[self._arms.index(a)] += 1.0
        weights[self._arms.index(b)] -= 1.0
        if not np.allclose(weights @ self._known, weights, atol=1e-8):
            raise ValueError(f"{a} and {b} share no seed, nor are they connected by other arms' seeds.")
        shared = sorted(self._losses[a].keys() & self._losses[b].keys())
        pairs = np.array([self._losses[a][seed] - self._losses[b][seed] for seed in shared])
        own = float(((pairs - pairs.mean()) ** 2).sum() / 2) if len(pairs) else 0.0
        if self._scatters_more(own, len(pairs) - 1):
            se = math.sqrt(2 * own / (len(pairs) - 1) / len(pairs))
            return Contrast(float(pairs.mean()), se, len(pairs) - 1, len(pairs), pooled=False)
        variance = self.variance
        rows = weights @ self._inverse
        se_pooled = None if variance is None else math.sqrt(variance * float(rows @ rows))
        return Contrast(float(weights @ self._effects), se_pooled, self.df, len(shared), pooled=True)

    def _scatters_more(self, own: float, df: int) -> bool:
        rest = self.df - df
        if df < 1 or rest < 1:
            return False
        others = max(self.squares - own, 0.0) / rest
        return own > 0 and (others == 0 or float(fdtrc(df, rest, own / df / others)) < UNEQUAL)


def holm(p_values: Sequence[float]) -> list[float]:
    """P values corrected for their number: all below alpha are true findings with probability 1 - alpha.

    S. Holm, A simple sequentially rejective multiple test procedure, Scand. J. Statist. 6 (1979).

    Args:
        p_values: (N,) one a claim
    """
    order = np.argsort(p_values)
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected
