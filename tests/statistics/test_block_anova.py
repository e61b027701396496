"""Contrasts of a randomized block design, against scipy's paired t test, closed forms and
simulations."""

import math
import re

import numpy as np
import pytest
from scipy import stats

from lightning_sv.errors import NotTestableError
from lightning_sv.statistics.block_anova import UNEQUAL, BlockDesign, BlockModel
from lightning_sv.statistics.verdicts import difference_sentence

#: of a run's variance at 3,000 steps in the first recordings: residual sd 0.0113, of the seed 0.31
#: of the whole. Later ones have 0 to 0.9 of the seed (docs/verdicts.md); seeds are fitted, so that
#: no interval depends on it
RESIDUAL_SD = 0.0113
SEED_SD = 0.0076


def draw(
    rng: np.random.Generator, arms: int, seeds: int, sd: float = RESIDUAL_SD
) -> dict[str, dict[int, float]]:
    seed_effect = rng.normal(0, SEED_SD, seeds)
    losses = 3.5 + seed_effect + rng.normal(0, sd, (arms, seeds))
    return {str(i): dict(enumerate(row)) for i, row in enumerate(losses.tolist())}


def test_block_design_balanced_equals_its_closed_form() -> None:
    """Two-way analysis of variance: residuals y_as - y_a. - y_.s + y.., (A - 1)(S - 1) degrees of
    freedom."""
    losses = draw(np.random.default_rng(1), 6, 4)
    y = np.array([list(row.values()) for row in losses.values()])
    residuals = y - y.mean(1, keepdims=True) - y.mean(0, keepdims=True) + y.mean()
    variance = (residuals**2).sum() / 15
    design = BlockDesign(losses)
    assert (design.pooled.df, design.pooled.variance) == (15, pytest.approx(variance, rel=1e-9))
    assert not design.left_out
    contrast = design.difference("2", "5")
    assert contrast.mean == pytest.approx(y[2].mean() - y[5].mean(), rel=1e-9)
    assert contrast.se == pytest.approx(math.sqrt(2 * variance / 4), rel=1e-9)
    back = design.difference("5", "2")
    assert back.mean == pytest.approx(-contrast.mean)
    assert back.p_above() == pytest.approx(contrast.p_below())


@pytest.mark.parametrize("has_other_arm", [False, True])
def test_block_design_copies_have_difference_zero(has_other_arm: bool) -> None:
    """Whatever the rounding errors of the solver, which differ between CPUs."""
    for seed in range(20):
        losses = draw(np.random.default_rng(seed), 2 if has_other_arm else 1, 3)
        design = BlockDesign(losses | {"copy": dict(losses["0"])})
        for pair in (("0", "copy"), ("copy", "0")):
            d = design.difference(*pair)
            assert (d.mean, d.low, d.high, d.se) == (0.0, 0.0, 0.0, 0.0)


def test_block_design_missing_run_estimated_through_other_arms() -> None:
    """A without seed 0 and B without seed 1 share only seed 2; their difference also uses C."""
    losses = {"a": {1: 1.0, 2: 2.0}, "b": {0: 0.5, 2: 2.5}, "c": {0: 0.1, 1: 1.1, 2: 2.1}}
    design = BlockDesign(losses)
    # normal equations with a, b, c and seeds 1, 2 over seed 0
    known = np.array([[1, 0, 0, 1, 0], [1, 0, 0, 0, 1], [0, 1, 0, 0, 0], [0, 1, 0, 0, 1],
                      [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 0, 1]], dtype=float)  # fmt: skip
    y = np.array([1.0, 2.0, 0.5, 2.5, 0.1, 1.1, 2.1])
    solved = np.linalg.solve(known.T @ known, known.T @ y)
    contrast = design.difference("a", "b")
    assert contrast.mean == pytest.approx(solved[0] - solved[1], rel=1e-9)
    assert (design.pooled.df, contrast.n) == (2, 1)
    weights = np.array([1, -1, 0, 0, 0])
    share = weights @ np.linalg.inv(known.T @ known) @ weights
    assert contrast.se == pytest.approx(math.sqrt(design.pooled.variance * share), rel=1e-9)


def test_block_design_no_shared_seed_refused() -> None:
    connected = {"a": {0: 1.0, 2: 1.1}, "b": {1: 2.0, 3: 2.1}, "c": dict.fromkeys(range(4), 1.5)}
    with pytest.raises(NotTestableError):
        BlockDesign(connected).difference("a", "b")
    one_pair = BlockDesign({"a": {0: 1.0, 1: 1.5}, "b": {1: 2.0, 2: 2.1}}).difference("a", "b")
    assert one_pair.mean == pytest.approx(-0.5) and not one_pair.has_interval
    alone = BlockDesign({"a": {0: 1.0}, "b": {0: 2.0}}).difference("a", "b")
    assert alone.mean == pytest.approx(-1.0) and alone.p_below() == 1.0
    assert not alone.has_interval


def test_block_design_arm_of_one_run_has_no_interval() -> None:
    """Because its own deviation is unknown."""
    losses = draw(np.random.default_rng(5), 6, 3)
    losses["5"] = {0: losses["5"][0]}
    design = BlockDesign(losses)
    few = design.difference("5", "0")
    assert np.isnan([few.low, few.high, few.se]).all() and (few.n, few.p_above()) == (1, 1.0)
    assert few.mean == pytest.approx(losses["5"][0] - losses["0"][0], rel=1e-6)
    assert design.difference("1", "0").scatter == "scatter of 5 arms, 8 degrees of freedom"


@pytest.mark.parametrize("distance", [-1.0, 1.0])
def test_difference_sentence_both_intervals_contain_the_distance(distance: float) -> None:
    losses = draw(np.random.default_rng(7), 3, 3)
    losses["1"] = {seed: loss + distance for seed, loss in losses["1"].items()}
    d = BlockDesign(losses).difference("1", "0")
    assert d.alone is not None
    sentence = difference_sentence("llama", "hg", d)
    mean, low, high, own_low, own_high = map(float, re.findall(r"[+-]?\d\.\d+", sentence))
    assert mean == pytest.approx(abs(d.mean), abs=1e-3)
    assert low < mean < high and own_low < mean < own_high


@pytest.mark.long
@pytest.mark.parametrize(
    ("arms", "seeds", "times", "coverage"),
    [(2, 3, 1, 0.95), (15, 3, 1, 0.945), (5, 6, 1, 0.945), (5, 3, 2, 0.884), (19, 4, 3, 0.852)],
)
def test_block_design_intervals_cover_at_the_measured_scatter(
    arms: int, seeds: int, times: float, coverage: float
) -> None:
    """95% if all arms scatter alike, fewer if one of the pair scatters `times` as much and no test
    notices it.

    Within three standard errors of the count and what the test costs: it leaves out an arm by
    chance in one of twenty designs.
    """
    rng = np.random.default_rng(arms * seeds)
    n = 2000
    hits = 0
    extra = (times**2 - 1) ** 0.5 * RESIDUAL_SD
    for _ in range(n):
        losses = draw(rng, arms, seeds)
        losses["0"] = {seed: loss + extra * rng.normal() for seed, loss in losses["0"].items()}
        d = BlockDesign(losses).difference("0", "1")
        hits += d.low <= 0 <= d.high
    assert hits / n == pytest.approx(coverage, abs=3 * math.sqrt(0.95 * 0.05 / n) + 0.004)


def test_block_design_arm_with_larger_scatter_is_left_out_alone() -> None:
    """Its pairs have their own scatter; the others are those of the design without it."""
    rng = np.random.default_rng(3)
    losses = draw(rng, 8, 6)
    calm = BlockDesign(losses)
    scatter = np.array([-4.0, 3.0, 4.0, -3.0, 2.0, -2.0])
    losses["wild"] = dict(enumerate(3.5 + scatter * RESIDUAL_SD))
    design = BlockDesign(losses)
    assert list(design.left_out) == ["wild"] and design.left_out["wild"] < UNEQUAL
    wild = design.difference("wild", "0")
    tame = design.difference("1", "0")
    pair = stats.ttest_rel(list(losses["wild"].values()), list(losses["0"].values()))
    assert wild.df == 5 and "8 others" in wild.scatter
    assert wild.p_below() == pytest.approx(float(stats.t.cdf(pair.statistic, 5)), rel=1e-9)
    assert tame.scatter == "scatter of 8 of 9 arms, 35 degrees of freedom"
    expected = calm.difference("1", "0")
    assert (tame.mean, tame.se, tame.df) == (expected.mean, expected.se, expected.df)


def test_block_model_p_scatters_more_equals_the_comparison_of_nested_models() -> None:
    """A model with one effect per run of an arm has the squares of the model without the arm."""
    losses = draw(np.random.default_rng(6), 4, 3)
    losses["0"].pop(1)
    model = BlockModel(losses)
    others = BlockModel({arm: row for arm, row in losses.items() if arm != "2"})
    assert (model.df, others.df) == (5, 3)
    f = (model.squares - others.squares) / 2 / (others.squares / 3)
    assert model.p_scatters_more("2") == pytest.approx(float(stats.f.sf(f, 2, 3)), rel=1e-9)


def test_block_design_few_pairs_also_have_their_own_scatter() -> None:
    losses = draw(np.random.default_rng(7), 5, 3)
    d = BlockDesign(losses).difference("1", "0", 0.9)
    pair = stats.ttest_rel(list(losses["1"].values()), list(losses["0"].values()))
    assert d.df == 8 and d.alone is not None
    interval = tuple(pair.confidence_interval(0.9))
    assert (d.alone.low, d.alone.high) == pytest.approx(interval, rel=1e-9)
    assert BlockDesign(draw(np.random.default_rng(7), 5, 4)).difference("1", "0").alone is None
