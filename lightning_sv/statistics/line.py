"""The line of a paired difference against the logarithm of the size of the model."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_sv.errors import NotTestableError
from lightning_sv.statistics.paired import PairedDifference, finite_differences, welch_df


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
    """Fit the line to the mean differences d_s of the S sizes by least squares.

        x_s = ln N_s - mean(ln N)
        offset = sum_s d_s / S
        slope = sum_s x_s d_s / sum_s x_s²

    Each size has a variance of its own, so the intervals are Student's with Welch's degrees of
    freedom, and the distances of the d_s from the line are no part of the error.

    Args:
        sizes: (S,) parameters of the models, above 0
        a: (S, seeds) final losses of A, nats per token
        b: (S, seeds) final losses of B, on the same seeds
        confidence: coverage of the intervals; there are none for one seed

    Raises:
        NotTestableError: there is one size, or a loss is not finite
    """
    if len(set(sizes)) < 2:
        raise NotTestableError("one size gives no slope")
    differences = finite_differences(b, a)
    x = np.log(sizes)
    x -= x.mean()
    offset = _weighted_mean(differences, np.full(len(x), 1 / len(x)), confidence)
    slope = _weighted_mean(differences, x / (x @ x), confidence)
    return DifferenceLine(offset, slope)


def _weighted_mean(
    differences: NDArray[np.float64], weights: NDArray[np.float64], confidence: float
) -> PairedDifference:
    """sum_s w_s d_s with the error sqrt(sum_s w_s² var_s / seeds), for the means d_s of the sizes.

    Args:
        differences: (S, seeds)
        weights: (S,)
        confidence: coverage of the interval
    """
    mean = float(weights @ differences.mean(axis=1))
    n = differences.size
    n_seeds = differences.shape[1]
    if n_seeds == 1:
        return PairedDifference.student(mean, math.nan, n=n, confidence=confidence, df=0)

    variances = weights**2 * differences.var(axis=1, ddof=1) / n_seeds  # of each size's term
    variance = float(variances.sum())
    df = n_seeds - 1
    if variance > 0:
        df = welch_df(variances, df)
    return PairedDifference.student(mean, math.sqrt(variance), n=n, confidence=confidence, df=df)
