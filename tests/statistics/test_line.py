"""The line of differences against size: least squares and Welch's test of scipy."""

import math

import numpy as np
import pytest
from scipy import stats

from lightning_sv.errors import NotTestableError
from lightning_sv.statistics.line import difference_line

SIZES = np.array([1e5, 3e5, 1e6, 3e6, 1e7])


def test_difference_line_equals_least_squares() -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(3, 0.1, (5, 3))
    d = rng.normal(0, 0.01, (5, 3)) - 0.02 * np.log(SIZES)[:, None]
    offset, slope = difference_line(list(SIZES), a, a + d)
    x = np.log(SIZES) - np.log(SIZES).mean()
    oracle = stats.linregress(np.repeat(x, 3), d.ravel())
    assert (offset.mean, slope.mean) == pytest.approx((oracle.intercept, oracle.slope))

    variances = d.var(axis=1, ddof=1) / 3
    terms = x**2 * variances / (x @ x) ** 2
    assert offset.se == pytest.approx(math.sqrt(variances.sum()) / 5)
    assert slope.se == pytest.approx(math.sqrt(terms.sum()))
    assert offset.df == math.floor(variances.sum() ** 2 / (variances**2 / 2).sum())
    assert slope.df == math.floor(terms.sum() ** 2 / (terms**2 / 2).sum())
    assert slope.n == 15


def test_difference_line_of_two_sizes_is_the_test_of_welch() -> None:
    """Half of the difference of two means, at x = -1 and 1."""
    rng = np.random.default_rng(0)
    d = rng.normal(0, [[0.02], [0.003]], (2, 4))
    _, slope = difference_line([1.0, math.exp(2)], np.zeros((2, 4)), d, 0.9)
    welch = stats.ttest_ind(d[1], d[0], equal_var=False)
    assert slope.mean / slope.se == pytest.approx(welch.statistic)
    assert slope.df == math.floor(welch.df)
    low, high = stats.t.interval(0.9, slope.df, slope.mean, slope.se)
    assert (slope.low, slope.high) == pytest.approx((low, high))
    flat = difference_line([1e5, 1e6], np.zeros((2, 4)), d[:1].repeat(2, axis=0))
    assert flat.slope.df == 6  # equal variances: all of the degrees of freedom


def test_difference_line_lack_of_fit_is_no_error() -> None:
    bent = np.array([[0.001, -0.001], [1.001, 0.999], [0.001, -0.001]])
    assert difference_line([1e5, 1e6, 1e7], np.zeros((3, 2)), bent).slope.se < 0.001


def test_difference_line_needs_two_sizes_two_seeds_and_finite_losses() -> None:
    with pytest.raises(NotTestableError):
        difference_line([1e5], [[3.0]], [[2.9]])
    with pytest.raises(NotTestableError, match="finite"):
        difference_line([1e5, 1e6], [[3.0], [2.0]], [[2.9], [math.nan]])
    one_seed = difference_line([1e5, 1e6], [[3.0], [2.0]], [[2.9], [1.8]])
    assert one_seed.offset.mean == pytest.approx(-0.15) and not one_seed.slope.has_interval
    equal = difference_line([1e5, 1e6], np.zeros((2, 2)), np.zeros((2, 2)))
    assert equal.slope.low == equal.slope.high == 0
