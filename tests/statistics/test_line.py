"""The line of differences against size: least squares and Welch's test of scipy, and coverage."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy.stats import linregress, ttest_ind

from lightning_sv.errors import NotTestableError
from lightning_sv.statistics.line import difference_line

SIZES = np.array([1e5, 3e5, 1e6, 3e6, 1e7])


def test_difference_line_equals_least_squares() -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(3, 0.1, (5, 3))
    d = rng.normal(0, 0.01, (5, 3)) - 0.02 * np.log(SIZES)[:, None]
    offset, slope = difference_line(list(SIZES), a, a + d)
    x = np.log(SIZES) - np.log(SIZES).mean()
    oracle = linregress(np.repeat(x, 3), d.ravel())
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
    _, slope = difference_line([1.0, math.exp(2)], np.zeros((2, 4)), d)
    welch = ttest_ind(d[1], d[0], equal_var=False)
    assert slope.mean / slope.se == pytest.approx(welch.statistic)
    assert slope.df == math.floor(welch.df)
    flat = difference_line([1e5, 1e6], np.zeros((2, 4)), d[:1].repeat(2, axis=0))
    assert flat.slope.df == 6  # equal variances: all of the degrees of freedom


@pytest.mark.parametrize(("deviations", "seeds"), [
    ((0.004,) * 5, 3),
    ((0.02, 0.003), 3),
    ((0.003, 0.003, 0.02), 3),
    ((0.02, 0.012, 0.006, 0.003), 4),
])  # fmt: skip
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_difference_line_intervals_cover_the_truth(
    deviations: Sequence[float], seeds: int, confidence: float
) -> None:
    """Losses that both runs of a pair share cancel; each size has a scatter of its own."""
    rng = np.random.default_rng(1)
    n_sizes = len(deviations)
    logarithms = np.log(SIZES[:n_sizes])
    truth = (0.05 - 0.01 * logarithms.mean(), -0.01)
    hits = np.zeros(2)
    trials = 1000
    for _ in range(trials):
        a = rng.normal(3, 0.1, (n_sizes, seeds))
        noise = rng.normal(0, np.array(deviations)[:, None], (n_sizes, seeds))
        b = a + noise + 0.05 - 0.01 * logarithms[:, None]
        line = difference_line(list(SIZES[:n_sizes]), a, b, confidence)
        hits += [d.low <= value <= d.high for d, value in zip(line, truth, strict=True)]
    sampling_error = math.sqrt(confidence * (1 - confidence) / trials)
    assert (hits / trials > confidence - 3 * sampling_error).all(), hits / trials
    assert (hits / trials < confidence + 0.06).all(), hits / trials  # few pairs: too wide


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
