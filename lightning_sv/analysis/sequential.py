"""Looking at runs before all are there, at a price that is fixed beforehand: alpha spending.

K. K. G. Lan and D. L. DeMets, Discrete sequential boundaries for clinical trials, Biometrika 70 (1983), with the
spending function after P. C. O'Brien and T. R. Fleming, Biometrics 35 (1979): early looks cost little, and the last
one is nearly as sharp as if it were the only one.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri

Array = NDArray[np.float64]

_POINTS = 2001  # of the grid of sums
_WIDTH = 18.0  # standard deviations below a bound that the grid reaches


def spent(share: float, alpha: float = 0.05) -> float:
    """alpha(t) = 2 - 2 Phi(z(1 - alpha / 2) / sqrt(t)): the error that may have been made by a share t of all pairs.

    Args:
        share: of the pairs that are planned, above 0 and at most 1
        alpha: one-sided error of the whole
    """
    return float(2 - 2 * ndtr(float(ndtri(1 - alpha / 2)) / math.sqrt(share)))


def levels(looks: Sequence[int], alpha: float = 0.05) -> list[float]:
    """One-sided p values below which to stop, look by look: together they err with probability alpha.

    The sum of n differences has the variance n in units of theirs. P(not stopped before, beyond the bound now) is an
    integral over the sums at the look before; the bound that makes it what is spent now is solved for.

    Args:
        looks: numbers of pairs, increasing; the last is that of the whole
        alpha: one-sided error of the whole

    Raises:
        ValueError: numbers of pairs that do not increase from 1 up
    """
    if not looks or list(looks) != sorted(set(looks)) or looks[0] < 1:
        raise ValueError(f"the looks are after {list(looks)} pairs; give numbers that increase, from 1 up.")
    return list(_levels(tuple(looks), alpha))


@lru_cache
def _levels(looks: tuple[int, ...], alpha: float) -> tuple[float, ...]:
    found: list[float] = []
    sums, density = np.zeros(1), np.ones(1)  # all at zero, before the first pair
    before = 0
    for n in looks:
        sd = math.sqrt(n - before)
        more = spent(n / looks[-1], alpha) - (spent(before / looks[-1], alpha) if before else 0.0)

        bound = float(brentq(_beyond, 0.0, 20 * math.sqrt(n), args=(sums, density, sd, more)))
        found.append(float(ndtr(-bound / math.sqrt(n))))
        here = np.linspace(bound - _WIDTH * math.sqrt(n), bound, _POINTS)
        steps = np.exp(-0.5 * ((here[:, None] - sums) / sd) ** 2) / (sd * math.sqrt(2 * math.pi))
        density = np.array([_integral(row, sums) for row in steps * density])
        sums, before = here, n
    return tuple(found)


def _beyond(bound: float, sums: Array, density: Array, sd: float, less: float) -> float:
    """P(not stopped before, sum now above the bound) - less."""
    return _integral(density * ndtr((sums - bound) / sd), sums) - less


def _integral(values: Array, at: Array) -> float:
    return float(np.trapezoid(values, at)) if at.size > 1 else float(values[0])
