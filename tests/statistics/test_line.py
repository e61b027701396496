"""The line of differences against size: least squares of scipy, and the coverage of its intervals."""

import numpy as np
import pytest
from scipy.stats import linregress

from lightning_sv.errors import NotTestableError
from lightning_sv.statistics.line import difference_line

SIZES = np.array([1e5, 3e5, 1e6, 3e6, 1e7])


def test_difference_line_equals_scipy() -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(3, 0.1, (5, 3))
    b = a + rng.normal(0, 0.01, (5, 3)) - 0.02 * np.log(SIZES)[:, None]
    found = difference_line(list(SIZES), a, b)
    x = np.repeat(np.log(SIZES / np.exp(np.log(SIZES).mean())), 3)
    oracle = linregress(x, (b - a).ravel())
    assert (found.slope.mean, found.slope.se) == pytest.approx((oracle.slope, oracle.stderr))
    estimate = (oracle.intercept, oracle.intercept_stderr)
    assert (found.offset.mean, found.offset.se) == pytest.approx(estimate)
    assert (found.slope.n, found.slope.df) == (15, 13)


def test_difference_line_intervals_cover_the_truth() -> None:
    """Offsets that both runs of a pair share cancel."""
    rng = np.random.default_rng(1)
    hits = np.zeros(2)
    trials = 400
    for _ in range(trials):
        a = rng.normal(3, 0.1, (5, 3))
        b = a + rng.normal(0, 0.004, (5, 3)) + 0.05 - 0.01 * np.log(SIZES)[:, None]
        line = difference_line(list(SIZES), a, b)
        truth = (0.05 - 0.01 * np.log(SIZES).mean(), -0.01)
        hits += [d.low <= value <= d.high for d, value in zip(line, truth, strict=True)]
    assert (np.abs(hits / trials - 0.95) < 0.04).all(), hits / trials


def test_difference_line_needs_two_sizes_and_three_pairs() -> None:
    with pytest.raises(NotTestableError):
        difference_line([1e5], [[3.0]], [[2.9]])
    two_pairs = difference_line([1e5, 1e6], [[3.0], [2.0]], [[2.9], [1.8]])
    assert two_pairs.offset.mean == pytest.approx(-0.15) and not two_pairs.slope.has_interval
