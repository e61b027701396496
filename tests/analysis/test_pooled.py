"""Contrasts of a randomized block design, against scipy's paired t test, closed forms and simulations."""

import math

import numpy as np
import pytest
from scipy import stats

from lightning_sv.analysis.pooled import Family, holm

#: of a run's variance at 3,000 steps, measured: residual sd 0.0113, of the seed 0.31 of the whole
RESIDUAL_SD, SEED_SD = 0.0113, 0.0076


def draw(rng: np.random.Generator, arms: int, seeds: int, sd: float = RESIDUAL_SD) -> dict[str, dict[int, float]]:
    seed_effect = rng.normal(0, SEED_SD, seeds)
    losses = 3.5 + seed_effect + rng.normal(0, sd, (arms, seeds))
    return {str(i): dict(enumerate(row)) for i, row in enumerate(losses.tolist())}


def test_two_arms_are_the_paired_t_test() -> None:
    losses = draw(np.random.default_rng(0), 2, 5)
    a, b = (list(losses[arm].values()) for arm in "01")
    contrast = Family(losses).contrast("0", "1")
    for alternative, p in (("less", contrast.p_below(0.001)), ("greater", contrast.p_above(0.001))):
        assert p == pytest.approx(stats.ttest_rel(a, np.array(b) + 0.001, alternative=alternative).pvalue, rel=1e-9)
    expected = stats.ttest_rel(a, b).confidence_interval(0.9)
    assert contrast.interval(0.9) == pytest.approx((expected.low, expected.high), rel=1e-9)
    assert (contrast.df, contrast.n) == (4, 5)


def test_a_whole_block_design_is_its_closed_form() -> None:
    """Two-way analysis of variance: residuals y_as - y_a. - y_.s + y.., (A - 1)(S - 1) degrees of freedom."""
    losses = draw(np.random.default_rng(1), 6, 4)
    y = np.array([list(row.values()) for row in losses.values()])
    residuals = y - y.mean(1, keepdims=True) - y.mean(0, keepdims=True) + y.mean()
    variance = (residuals**2).sum() / 15
    family = Family(losses)
    assert (family.df, family.variance) == (15, pytest.approx(variance, rel=1e-9))
    contrast = family.contrast("2", "5")
    assert contrast.mean == pytest.approx(y[2].mean() - y[5].mean(), rel=1e-9)
    assert contrast.se == pytest.approx(math.sqrt(2 * variance / 4), rel=1e-9)
    back = family.contrast("5", "2")
    assert back.mean == pytest.approx(-contrast.mean) and back.p_above() == pytest.approx(contrast.p_below())


def test_a_missing_run_is_bridged_by_the_other_arms() -> None:
    """A without seed 0 and B without seed 1 share seed 2 alone, and their difference uses all that C tells."""
    losses = {"a": {1: 1.0, 2: 2.0}, "b": {0: 0.5, 2: 2.5}, "c": {0: 0.1, 1: 1.1, 2: 2.1}}
    family = Family(losses)
    # normal equations with a, b, c and seeds 1, 2 over seed 0
    design = np.array([[1, 0, 0, 1, 0], [1, 0, 0, 0, 1], [0, 1, 0, 0, 0], [0, 1, 0, 0, 1],
                       [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 0, 1]], dtype=float)  # fmt: skip
    y = np.array([1.0, 2.0, 0.5, 2.5, 0.1, 1.1, 2.1])
    solved = np.linalg.solve(design.T @ design, design.T @ y)
    contrast = family.contrast("a", "b")
    assert contrast.mean == pytest.approx(solved[0] - solved[1], rel=1e-9)
    assert (family.df, contrast.n) == (2, 1)
    unit = np.linalg.inv(design.T @ design)
    assert contrast.se == pytest.approx(
        math.sqrt(family.squares / 2 * (unit[0, 0] + unit[1, 1] - 2 * unit[0, 1])), rel=1e-9
    )


def test_wrong_families_are_refused() -> None:
    with pytest.raises(ValueError, match="share no seed"):
        Family({"a": {0: 1.0}, "b": {1: 2.0}}).contrast("a", "b")
    with pytest.raises(ValueError, match="no arm 'c'; it has a, b"):
        Family({"a": {0: 1.0}, "b": {0: 2.0}}).contrast("a", "c")
    with pytest.raises(ValueError, match="a, seed 0, is not finite"):
        Family({"a": {0: math.nan}, "b": {0: 2.0}})
    alone = Family({"a": {0: 1.0}, "b": {0: 2.0}}).contrast("a", "b")
    assert alone.mean == pytest.approx(-1.0) and (alone.interval(), alone.p_below()) == (None, 1.0)


@pytest.mark.parametrize(("arms", "seeds"), [(2, 3), (6, 3), (15, 3), (6, 6)])
def test_intervals_cover_at_the_measured_scatter(arms: int, seeds: int) -> None:
    """95%, within three standard errors of the count; the normal quantile would cover 81% of three pairs alone.

    The fallback to pairs that scatter more, taken in one of twenty families by chance, costs no coverage.
    """
    rng, n = np.random.default_rng(arms * seeds), 4000
    hits = 0
    for _ in range(n):
        low, high = Family(draw(rng, arms, seeds)).contrast("0", "1").interval() or (1.0, 0.0)
        hits += low <= 0 <= high
    assert hits / n == pytest.approx(0.95, abs=3 * math.sqrt(0.95 * 0.05 / n) + 0.003)


def test_a_pair_that_scatters_more_is_taken_by_itself() -> None:
    rng = np.random.default_rng(3)
    losses = draw(rng, 8, 6)
    losses["wild"] = {seed: 3.5 + float(rng.normal(0, 12 * RESIDUAL_SD)) for seed in range(6)}
    family = Family(losses)
    wild, tame = family.contrast("wild", "0"), family.contrast("1", "0")
    pair = stats.ttest_rel(list(losses["wild"].values()), list(losses["0"].values()))
    assert not wild.pooled and wild.df == 5
    assert wild.p_below() == pytest.approx(float(stats.t.cdf(pair.statistic, 5)), rel=1e-9)
    assert tame.pooled and tame.df == family.df


def test_equivalence_is_decided_by_two_one_sided_tests() -> None:
    rng, n, at_the_margin, at_zero = np.random.default_rng(4), 2000, 0, 0
    for _ in range(n):
        losses = draw(rng, 15, 6)
        contrast = Family(losses).contrast("0", "1")
        at_zero += contrast.p_within(0.02) < 0.05
        shifted = {**losses, "0": {seed: loss + 0.02 for seed, loss in losses["0"].items()}}
        at_the_margin += Family(shifted).contrast("0", "1").p_within(0.02) < 0.05
    assert at_the_margin / n == pytest.approx(0.05, abs=3 * math.sqrt(0.05 * 0.95 / n))  # never more than it says
    assert at_zero / n > 0.75  # and it can be shown at all: 0.84 by the formula, less the pairs taken by themselves
    interval = contrast.interval(0.9)
    assert interval is not None
    inside = interval[0] > -0.02 and interval[1] < 0.02
    assert inside == (contrast.p_within(0.02) < 0.05)  # the same as the 90% interval inside the margin


def test_holm_is_the_step_down_of_bonferroni() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1.0, 1.0]
