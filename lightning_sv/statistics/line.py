"""The line of a paired difference against the logarithm of the size of the model."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from lightning_sv.errors import NotTestableError
from lightning_sv.statistics.paired import PairedDifference


class DifferenceLine(NamedTuple):
    """L_B - L_A = offset + slope (ln N - mean(ln N)), nats per token.

    Attributes:
        offset: L_B - L_A at the geometric mean of the sizes
        slope: change of L_B - L_A per e-fold of size: below 0, the loss of B falls faster
    """

    offset: PairedDifference
    slope: PairedDifference


def difference_line(
    sizes: Sequence[float], a: ArrayLike, b: ArrayLike, confidence: float = 0.95
) -> DifferenceLine:
    """Fit the line to the differences of all n = S * seeds pairs by least squares.

    The intervals are Student's with n - 2 degrees of freedom. They assume that the differences lie
    on a line, and that pairs have one variance at all sizes.

    Args:
        sizes: (S,) parameters of the models, above 0
        a: (S, seeds) final losses of A, nats per token
        b: (S, seeds) final losses of B, on the same seeds
        confidence: coverage of the intervals

    Raises:
        NotTestableError: there is one size
    """
    if len(set(sizes)) < 2:
        raise NotTestableError("one size gives no slope")
    differences = np.asarray(b, dtype=np.float64) - np.asarray(a, dtype=np.float64)
    n_seeds = differences.shape[1]
    y = differences.ravel()
    x = np.repeat(np.log(sizes), n_seeds)
    x -= x.mean()

    squares = float(x @ x)
    offset = float(y.mean())
    slope = float(x @ y) / squares
    residuals = y - offset - slope * x
    n = len(y)
    df = n - 2
    variance = float(residuals @ residuals) / df if df else math.nan

    def estimate(value: float, variance_of_value: float) -> PairedDifference:
        se = math.sqrt(variance_of_value)
        return PairedDifference.student(value, se, n=n, confidence=confidence, df=df)

    return DifferenceLine(estimate(offset, variance / n), estimate(slope, variance / squares))
