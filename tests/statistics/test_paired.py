"""Paired statistics, compared with scipy and closed forms."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from lightning_sv.errors import NotTestableError
from lightning_sv.runs.events import Curve
from lightning_sv.statistics.paired import (
    on_one_grid,
    paired_curve,
    paired_difference,
    token_efficiency,
    tokens_to_reach,
    welch_df,
)
from lightning_sv.statistics.verdicts import Outcome, opposite, tokens_sentence, verdict_below

LOSSES = st.floats(0.5, 12, allow_nan=False)


def curve(tokens: list[int], values: list[float]) -> Curve:
    return Curve(np.array(tokens, dtype=np.int64), np.array(values))


@given(st.floats(1e-4, 1.0), st.integers(1, 40), st.integers(2, 6))
def test_welch_df_of_equal_variances_is_their_sum(se: float, df: int, count: int) -> None:
    assert welch_df([se**2] * count, [df] * count) == count * df
    assert welch_df([se**2, 0.0], [df, 1]) == df


@given(st.lists(st.tuples(LOSSES, LOSSES), min_size=2, max_size=8), st.sampled_from([0.9, 0.95]))
def test_paired_difference_equals_scipys_paired_t(
    pairs: list[tuple[float, float]], confidence: float
) -> None:
    a, b = map(np.array, zip(*pairs, strict=True))
    ours = paired_difference(a, b, confidence)
    assert ours.mean == pytest.approx(float(np.mean(a - b)), abs=1e-12)
    assert ours.se == pytest.approx(float(scipy_stats.sem(a - b)), abs=1e-12)
    if np.ptp(a - b) > 1e-9:  # scipy gives NaN without scatter
        oracle = scipy_stats.ttest_1samp(a - b, 0).confidence_interval(confidence)
        assert (ours.low, ours.high) == pytest.approx((oracle.low, oracle.high), abs=1e-9)
    swapped = paired_difference(b, a, confidence)
    assert swapped.mean == pytest.approx(-ours.mean)
    assert verdict_below(swapped) == opposite(Outcome(verdict_below(ours), 1.0)).word


def test_paired_difference_diverged_run_refused() -> None:
    with pytest.raises(NotTestableError):
        paired_difference([1.0, math.nan], [1.0, 1.0])


@pytest.mark.parametrize(
    ("losses", "target", "reached"),
    [
        ([4.0, 3.0, 2.0], 3.5, 15),
        ([4.0, 3.0, 2.0], 2.25, 35),
        ([4.0, 3.0, 2.0], 2.0, 40),
        ([4.0, 3.0, 2.0], 5.0, 10),
        ([4.0, 3.0, 2.0], 1.9, None),
        ([4.0, 2.0, 3.0], 3.0, 15),
        ([math.nan, 3.0, 2.0], 3.5, 20),
    ],
)
def test_tokens_to_reach_is_the_first_crossing(
    losses: list[float], target: float, reached: float | None
) -> None:
    found = tokens_to_reach([10, 20, 40], losses, target)
    assert found == (None if reached is None else pytest.approx(reached))


def test_token_efficiency_is_a_geometric_mean() -> None:
    """To the higher final loss of each pair, whichever arm it is of."""
    a = [curve([0, 80], [4.0, 2.0]), curve([0, 20, 80], [5.0, 3.0, 1.0])]
    b = [curve([0, 10, 80], [4.0, 2.0, 1.0]), curve([0, 80], [5.0, 3.0])]
    found = token_efficiency(a, b)
    assert found.tokens_a == (80, 20) and found.tokens_b == (10, 80)
    factor = math.sqrt(8 / 4)
    assert found.factor == pytest.approx(factor)
    narrow = token_efficiency(a, b, 0.9)
    assert found.low < narrow.low < factor < narrow.high < found.high
    logarithms = paired_difference(np.log(found.tokens_a), np.log(found.tokens_b))
    assert (found.low, found.high) == pytest.approx(np.exp([logarithms.low, logarithms.high]))
    swapped = token_efficiency(b, a)
    assert (swapped.low, swapped.high) == pytest.approx((1 / found.high, 1 / found.low))


FALLING = curve([0, 40, 80], [4.0, 2.0, 1.0])


@pytest.mark.parametrize(("a", "b"), [
    (curve([80], [2.0]), FALLING),  # its final loss alone
    (curve([0, 80], [4.0, 4.0]), FALLING),  # the loss of 0 tokens
    (curve([0, 80], [4.0, 2.0]), curve([50, 80], [2.0, 1.0])),  # before the first validation
    (curve([0, 80], [4.0, 2.0]), curve([0, 40, 80], [4.0, 1.0, math.nan])),  # it diverged later
])  # fmt: skip
def test_token_efficiency_unknown_has_a_reason(a: Curve, b: Curve) -> None:
    found = token_efficiency([a], [b])
    assert found.why_not and found.tokens_a == () and not found.has_factor
    assert found.why_not in tokens_sentence("a", "b", found)


def test_on_one_grid_different_grids_are_interpolated() -> None:
    fine = np.arange(10, 101, 10)
    coarse = np.array([25, 50, 75, 95])
    tokens, values = on_one_grid([curve(fine, 4 - fine / 50), curve(coarse, 5 - coarse / 25)])
    assert tokens.tolist() == coarse.tolist()
    expected = np.stack([4 - coarse / 50, 5 - coarse / 25])
    assert values == pytest.approx(expected, abs=1e-12)
    band = paired_curve([curve(fine, 4 - fine / 50)], [curve(coarse, 5 - coarse / 25)])
    assert band.mean == pytest.approx(1 - coarse / 50, abs=1e-12)
    inner, _ = on_one_grid([curve([1, 100], [2.0, 1.0]), curve([40, 60], [1.0, 0.0])])
    assert inner.tolist() == [40, 60]
    with pytest.raises(NotTestableError):
        on_one_grid([curve([10, 30], [2.0, 1.0]), curve([40, 60], [1.0, 0.0])])
