"""Each kind of claim on curves with a known result."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from lightning_sv.errors import NotTestableError
from lightning_sv.experiments.arms import Arm, PlannedArm
from lightning_sv.experiments.claims.corrections import holm
from lightning_sv.experiments.claims.decide import verdicts
from lightning_sv.experiments.claims.pooling import FINAL, LossAt, Pool
from lightning_sv.experiments.evaluate import decide_claims, load_panels
from lightning_sv.experiments.kinds.base import KINDS, LOSS_CLAIMS, LoadedPanel, PlannedPanel
from lightning_sv.experiments.pairs import Pair
from lightning_sv.experiments.results import Figure, Verdict
from lightning_sv.experiments.run_spec import RunSpec
from lightning_sv.experiments.run_store import RunStore
from lightning_sv.experiments.spec import ClaimSpec, FigureSpec, PanelSpec
from lightning_sv.runs.events import Curve, Run
from lightning_sv.statistics.line import difference_line
from lightning_sv.statistics.paired import paired_difference

TOKENS = np.arange(100, 2001, 100)
#: loss of `b`, which falls by 1/2000 per token
FALLING = 4 - TOKENS / 2000
NOISE = (0.001, -0.001, 0.0005, -0.0005)  # noise of the pairs, with mean zero
Q = "branch_norm/mean/q_proj/effective"
V = "branch_norm/mean/v_proj/effective"
HOLDS = "holds"
CONTRADICTED = "contradicted"
EQUAL = "equal within 0.01"
NOT_RESOLVED = "not resolved"
NOT_TESTABLE = "not testable here"


def run(values: np.ndarray, **scalars: np.ndarray) -> Run:
    tokens = 100 * np.arange(1, len(values) + 1)
    curves = {"val/loss": Curve(tokens, values)}
    curves |= {tag: Curve(tokens, scalar) for tag, scalar in scalars.items()}
    return Run(Path("run"), "x", {}, {}, curves)


def arm(label: str, gap: Any = 0.0, noise: Sequence[float] = NOISE) -> Arm:
    """Return runs whose loss is 4 - tokens / 2000 + gap + the noise of the pair."""
    runs = [run(FALLING + gap + x) for x in noise]
    return of_runs(label, runs)


def of_runs(label: str, runs: Sequence[Run]) -> Arm:
    return Arm(label, dict(enumerate(runs)), baseline=label == "b")


def flat(label: str = "b") -> Arm:
    return arm(label, noise=(0.0,) * 4)


def wide(label: str = "a", gap: Any = 0.0, times: float = 20.0) -> Arm:
    return arm(label, gap, [times * x for x in NOISE])


def panel_of(claims: Sequence[ClaimSpec], *arms: Arm, **fields: Any) -> LoadedPanel:
    return LoadedPanel.of_arms(PanelSpec("panel", claims=list(claims), **fields), arms)


def judge_all(kind: str, *arms: Arm, **fields: Any) -> list[Verdict]:
    """Return one verdict per part of the claim."""
    return verdicts(ClaimSpec(kind, "0.028", a="a", b="b", **fields), panel_of([], *arms))


def judge(kind: str, *arms: Arm, **fields: Any) -> Verdict:
    (verdict,) = judge_all(kind, *arms, **fields)
    return verdict


def interval_of(verdict: Verdict) -> tuple[float, ...]:
    return verdict.estimate, verdict.low, verdict.high


SPEC = RunSpec("tiny", "hg", "", (), "{}", 600, 600_000, 100_000, 1.0, "tiny")
LEAD = -0.04 * TOKENS / 2000
#: the lead is 0.04 at 80% of the tokens, and 0.03 at the end
SHRINKS = np.interp(TOKENS, [100, 1600, 2000], [0, -0.04, -0.03])
DIP = np.interp(TOKENS, [900, 1000, 1100], [-0.04, 0.02, -0.04])


LONGER = [run(4 - np.arange(1, 29) / 20 + 0.405 + x) for x in NOISE]  # 1.4 times the tokens


@pytest.mark.parametrize(("kind", "a", "fields", "expected"), [
    ("less", arm("a", -0.02), {"until": 0.5}, [(-0.02, HOLDS)]),
    ("not_less", arm("a", 0.02), {}, [(0.02, HOLDS)]),
    ("equal", of_runs("a", LONGER), {"margin": 0.01}, [(0.005, HOLDS)]),
    ("leads", arm("a", DIP), {}, [(-0.04, HOLDS), (0.02, CONTRADICTED), (-0.04, HOLDS), (-0.04, HOLDS)]),
    ("widens", arm("a", 0.1 + LEAD), {"at": 0.5}, [(-0.02, HOLDS), (0.06, CONTRADICTED)]),
    ("widens", arm("a", SHRINKS), {"at": 0.4, "until": 0.8}, [(-0.0213, HOLDS), (-0.04, HOLDS)]),
    ("keeps", arm("a", SHRINKS), {"at": 0.8, "margin": 0.005}, [(-0.04, HOLDS), (0.01, CONTRADICTED)]),
])  # fmt: skip
def test_loss_claims_have_an_estimate_and_a_word_per_part(
    kind: str, a: Arm, fields: dict[str, Any], expected: list[tuple[float, str]]
) -> None:
    found = judge_all(kind, a, flat(), **fields)
    assert [verdict.verdict for verdict in found] == [word for _, word in expected]
    estimates = [estimate for estimate, _ in expected]
    assert [verdict.estimate for verdict in found] == pytest.approx(estimates, abs=1e-4)


def with_full_last_validation(a: Arm, apart: float) -> Arm:
    """Return runs whose last loss, that of more sequences, is `apart` from that of the others."""
    runs = []
    for one in a.runs:
        tokens, values = one.curve("val/loss")
        losses = Curve(tokens, values + apart * (tokens == tokens[-1]))
        data = {"val_sequences": 512, "full_last_validation": True}
        runs.append(replace(one, config={"data": data}, curves={"val/loss": losses}))
    return of_runs(a.label, runs)


def test_change_is_that_on_the_same_sequences() -> None:
    """From half to 95% of the tokens, because the last validation reads more sequences."""
    a = with_full_last_validation(arm("a", 0.1 + LEAD), 0.5)
    widens, lead = judge_all("widens", a, with_full_last_validation(flat(), 0.4), at=0.5)
    assert widens.estimate == pytest.approx(-0.04 * 0.45, abs=1e-4)
    assert lead.estimate == pytest.approx(0.1 - 0.04 + 0.1, abs=1e-4)  # the final losses
    with pytest.raises(NotTestableError):
        judge_all("widens", a, with_full_last_validation(flat(), 0.4), at=0.95)


@given(
    gap=st.floats(-0.1, 0.1),
    margin=st.floats(0, 0.05),
    noise=st.lists(st.floats(-0.05, 0.05), min_size=2, max_size=6),
)
def test_verdict_any_losses_are_resolved_by_their_p_value(
    gap: float, margin: float, noise: list[float]
) -> None:
    arms = (arm("a", gap, noise), arm("b", noise=[0.0] * len(noise)))
    for kind in ("less", "equal"):
        verdict = judge(kind, *arms, margin=margin)
        is_resolved = verdict.verdict != NOT_RESOLVED
        assert (verdict.p < 0.05) == is_resolved or verdict.p == pytest.approx(0.05)
    less_than = judge("less", *arms, margin=margin)
    other = judge("not_less", *arms, margin=margin)
    assert {less_than.verdict, other.verdict} not in ({HOLDS}, {CONTRADICTED})


@pytest.mark.parametrize("kind", LOSS_CLAIMS)
def test_verdicts_one_pair_are_not_resolved(kind: str) -> None:
    gap = np.linspace(0.1, 0.5, len(TOKENS))
    for sign in (1, -1):
        for found in judge_all(kind, arm("a", sign * gap, [0.0]), arm("b", noise=[0.0])):
            assert (found.verdict, found.n) == (NOT_RESOLVED, 1)
            assert np.isnan([found.low, found.high, found.p]).all()


def test_efficiency_is_the_ratio_of_tokens() -> None:
    """A is 0.1 lower on a slope of 1/2000 per token: it reaches B's final loss 200 tokens early."""
    every = (arm("a", -0.1), flat())
    found = judge("efficiency", *every)
    assert found.verdict == HOLDS
    assert found.estimate == pytest.approx(2000 / 1800, rel=1e-4)
    assert 1 < found.low < found.estimate

    two_seeds = replace(panel_of([], *every), arms=tuple(each.on((0, 1)) for each in every))
    (again,) = verdicts(ClaimSpec("efficiency", "", a="a", b="b"), two_seeds)
    assert (again.n, again.low) == (4, found.low)  # all pairs of the pool

    lucky = judge("efficiency", arm("a", -0.01, (0.0, 0.0, 0.0, 0.02)), flat())
    assert lucky.verdict == NOT_RESOLVED and lucky.estimate < 1.01
    worse = judge("efficiency", arm("a", 0.1), flat())
    assert worse.verdict == CONTRADICTED and worse.estimate == pytest.approx(0.9, rel=1e-3)
    ends = [run(np.array([3 + x])) for x in NOISE]
    with pytest.raises(NotTestableError):
        judge("efficiency", of_runs("a", ends), of_runs("b", ends))


@pytest.mark.parametrize("offset", [-0.05, 0.05])
def test_efficiency_is_measured_on_the_same_sequences(offset: float) -> None:
    """The last validation may read the whole split, whose loss differs by an offset."""
    arms = [with_full_last_validation(each, offset) for each in (arm("a", -0.1), flat())]
    found = judge("efficiency", *arms)
    last = TOKENS[-2]
    assert found.estimate == pytest.approx(last / (last - 200), rel=1e-3)
    pair = Pair(arms[1], arms[0], paired_difference([0.0], [0.1]))
    assert pair.efficiency.factor == pytest.approx(found.estimate)


UP = np.linspace(1, 2, len(TOKENS))
DOWN = np.linspace(1, 0.5, len(TOKENS))


@pytest.mark.parametrize(("q", "v", "word"), [
    (UP, DOWN, HOLDS),
    (UP, UP * 1.02, CONTRADICTED),
    (UP, np.linspace(1, 2 * math.exp(0.1), len(TOKENS)), NOT_RESOLVED),
])  # fmt: skip
def test_apart_norms_compare_their_growth(q: np.ndarray, v: np.ndarray, word: str) -> None:
    runs = [run(FALLING, **{Q: q ** (1 + x), V: v ** (1 - x)}) for x in NOISE]
    found = judge("apart", of_runs("a", runs), tags=[Q, V], margin=0.1)
    assert (found.verdict, found.unit) == (word, "in logarithms")
    growths = math.log(q[-1] / q[0]) - math.log(v[-1] / v[0])
    assert found.estimate == pytest.approx(growths, abs=1e-4)
    crossing = [run(FALLING, **{Q: q - 1.5, V: v}) for _ in NOISE]
    with pytest.raises(NotTestableError, match=Q):
        judge("apart", of_runs("a", crossing), tags=[Q, V], margin=0.1)


def less(name: str, **fields: Any) -> ClaimSpec:
    return ClaimSpec("less", "", a=f"a{name}", b=f"b{name}", **fields)


FOUR_SIZES = (1e5, 2e5, 4e5, 8e5)


def scaling_panel(slopes: dict[str, float], sizes: Sequence[float] = FOUR_SIZES) -> LoadedPanel:
    """Return power laws without a floor, with noise that grows with size; `b` is the baseline."""
    arms = []
    for label, slope in slopes.items():
        for n in sizes:
            loss = 9 * (n / 1e5) ** slope
            runs = [run(loss * np.array([1 + x * n / 1e5])) for x in (1e-4, -1e-4, 0.0)]
            point = replace(of_runs(label, runs), label=f"{label}, {n:g}")
            arms.append(replace(point, series=label, point=(n,), size=f"{n:g}"))
    return panel_of([], *arms, kind="scaling")


STEEPER = ClaimSpec("slope", "steeper", a="a", b="b")


@pytest.mark.parametrize(("a", "b", "sizes", "word"), [
    (-0.08, -0.05, FOUR_SIZES, HOLDS),
    (-0.08, -0.05, FOUR_SIZES[:2], HOLDS),
    (-0.05, -0.08, FOUR_SIZES, CONTRADICTED),
    (-0.05, -0.05, FOUR_SIZES, NOT_RESOLVED),
])  # fmt: skip
def test_slope_is_that_of_the_difference(
    a: float, b: float, sizes: Sequence[float], word: str
) -> None:
    panel = scaling_panel({"a": a, "b": b}, sizes)
    (found,) = verdicts(STEEPER, panel)
    series_a, series_b = panel.series
    line = difference_line(sizes, series_b.losses, series_a.losses, 0.9)
    assert found.verdict == word
    assert interval_of(found) == (line.slope.mean, line.slope.low, line.slope.high)
    assert [line.slope.mean for _, line in panel.kind.lines(panel)] == [found.estimate]


def test_claims_of_sizes_have_a_verdict_per_size_and_the_largest_is_primary() -> None:
    claim = ClaimSpec("less", "", a="a", b="b")
    panel = scaling_panel({"a": -0.08, "b": -0.05})
    panel = replace(panel, spec=replace(panel.spec, claims=[claim]))
    (found,) = decide_claims([figure_of("x", panel)])
    sizes = ("100000", "200000", "400000", "800000")
    assert [v.claim for v in found.verdicts] == [f"a, {n} ends below b, {n}" for n in sizes]
    assert [v.verdict for v in found.verdicts] == [EQUAL, HOLDS, HOLDS, HOLDS]
    assert [v.primary for v in found.verdicts] == [False, False, False, True]


@pytest.mark.parametrize("kind", ["cost", "memory"])
def test_cost_and_memory_are_ratios_of_the_second_half(kind: str) -> None:
    warm = np.where(np.arange(20) < 10, 5.0, 1.0)
    arms = []
    for label, r in (("a", 1.1), ("b", 1.0)):
        runs = []
        for x in NOISE:
            speed = 1e4 * warm ** (r - 1) * (1 + x) / r
            scalars = {"throughput/tokens_per_s": speed, "memory/peak_gib": np.full(20, 2 * r)}
            runs.append(run(FALLING, **scalars))
        arms.append(of_runs(label, runs))
    found = judge(kind, *arms, margin=1.2)
    assert found.verdict == HOLDS
    assert interval_of(found) == pytest.approx((1.1, 1.1, 1.1))
    rows = KINDS["table"].table(panel_of([], *arms)).to_numpy().tolist()
    assert rows[1] == ["b", "1e+04", "2", "not stated", "4"]


def test_lower_is_the_ratio_of_last_values() -> None:
    ratios = 0.8 * np.array([1.01, 0.99, 1.02, 1.0])
    before = np.where(np.arange(20) < 19, 9.0, 1.0)
    a = [run(FALLING, sharp=50 * ratio * before) for ratio in ratios]
    b = [run(FALLING, sharp=np.full(20, 50.0)) for _ in ratios]
    zero = [run(FALLING, sharp=np.zeros(20)) for _ in ratios]

    def scalar(a: list[Run], b: list[Run]) -> LoadedPanel:
        return panel_of([], of_runs("a", a), of_runs("b", b), kind="scalar", tag="sharp")

    claim = ClaimSpec("lower", "bounded", a="a", b="b")
    (found,) = verdicts(claim, scalar(a, b))
    logarithms = np.log(ratios)
    oracle = scipy_stats.ttest_1samp(logarithms, 0)
    expected = np.exp([logarithms.mean(), *oracle.confidence_interval(0.9)])
    assert (found.verdict, found.unit) == (HOLDS, "times")
    assert interval_of(found) == pytest.approx(tuple(expected))
    assert found.p == pytest.approx(oracle.pvalue / 2)
    (other,) = verdicts(claim, scalar(b, a))
    assert other.verdict == CONTRADICTED
    with pytest.raises(NotTestableError, match="sharp"):
        verdicts(claim, scalar(zero, b))
    with pytest.raises(ValueError, match="sharp"):
        verdicts(claim, scalar([run(FALLING)], b))


def grid(gap: float, noise: float, values: Sequence[float], narrow: float = 1.0) -> LoadedPanel:
    """Return two arms on three seeds: parabolas with their minimum at 2.

    `a` is lower by `gap` and `narrow` times as steep.
    """
    rng = np.random.default_rng(1)
    arms = []
    for label, offset, steep in (("b", 0.0, 1.0), ("a", gap, narrow)):
        for x in values:
            loss = offset + 0.05 * steep * math.log(x / 2.0) ** 2
            losses = [0.1 * seed + noise * rng.normal() for seed in range(3)]
            point = arm(f"{label}, lr {x:g}", loss, losses)
            arms.append(replace(point, series=label, point=(x,)))
    return panel_of([], *arms, kind="grid", axes={"model.optim.lr": {}})


@pytest.mark.parametrize(("gap", "noise", "word"), [
    (-0.02, 0.002, HOLDS),  # the offsets of the seeds, 0.1 apart, are common to both
    (0.02, 0.002, CONTRADICTED),
    (-0.002, 0.03, NOT_RESOLVED),
])  # fmt: skip
def test_grid_gap_optima_have_their_errors(gap: float, noise: float, word: str) -> None:
    panel = grid(gap, noise, (1.0, 2.0, 4.0))
    (found,) = verdicts(ClaimSpec("grid_gap", "", a="a", b="b"), panel)
    assert found.verdict == word, found.sentence
    assert found.estimate == pytest.approx(gap, abs=10 * noise)
    samples = []  # with the mean, standard error and degrees of freedom of each optimum
    for optimum in (series.optimum for series in panel.series):
        sample = scipy_stats.zscore(np.arange(optimum.df + 1), ddof=1)
        samples.append(optimum.loss + optimum.se * math.sqrt(optimum.df + 1) * sample)
    welch = scipy_stats.ttest_ind(*samples, equal_var=False)
    assert found.df == math.floor(welch.df) < 8


def test_grid_gap_lowest_at_the_end_is_not_resolved() -> None:
    panel = grid(-0.02, 0.002, (2.0, 4.0, 8.0))
    (found,) = verdicts(ClaimSpec("grid_gap", "", a="a", b="b"), panel)
    assert found.verdict == NOT_RESOLVED and math.isnan(found.low)


def test_series_that_diverged_everywhere_leaves_the_others() -> None:
    panel = grid(-0.02, 0.002, (1.0, 2.0, 4.0))
    arms = []
    for point in panel.arms:
        lost = replace(point, by_seed={}, diverged=point.runs)
        arms.append(lost if point.series == "a" else point)
    kept = panel.kind.comparable(arms)
    assert [arm.series for arm in kept] == ["b"] * 3
    rest = replace(LoadedPanel.of_arms(panel.spec, arms), arms=kept)
    assert [series.label for series in rest.series] == ["b"]
    with pytest.raises(NotTestableError, match="diverged"):
        verdicts(ClaimSpec("grid_gap", "", a="a", b="b"), rest)


def test_sensitivity_is_the_mean_excess_over_the_lowest_loss() -> None:
    claim = ClaimSpec("sensitivity", "", a="a", b="b")
    values = (1.0, 2.0, 4.0, 16.0)
    panel = grid(-0.3, 0.001, values, narrow=0.5)
    (found,) = verdicts(claim, panel)
    excess = 0.05 * float(np.mean(np.log(np.array(values) / 2) ** 2))
    assert found.verdict == HOLDS
    assert found.estimate == pytest.approx(-0.5 * excess, abs=0.005)
    *others, last = panel.arms
    lost = replace(last, by_seed={}, diverged=last.runs)
    with pytest.raises(NotTestableError):
        verdicts(claim, LoadedPanel.of_arms(panel.spec, [*others, lost]))


def test_verdicts_run_ends_before_crossing_not_testable() -> None:
    panel = scaling_panel({"a": -0.08, "b": -0.05}, FOUR_SIZES[:2])
    arms = []
    for each in panel.arms:
        steps = 599 if each.size == "100000" else 600
        arms.append(replace(each, run_spec=replace(SPEC, identity=each.label, steps=steps)))
    panel = LoadedPanel.of_arms(panel.spec, arms)
    short, enough = verdicts(ClaimSpec("less", "lower", a="a", b="b", crossing=600), panel)
    assert (short.verdict, enough.verdict) == (NOT_TESTABLE, HOLDS)
    with pytest.raises(NotTestableError, match="599"):
        verdicts(replace(STEEPER, crossing=600), panel)


def without_runs(panel: LoadedPanel, label: str) -> LoadedPanel:
    arms = []
    for each in panel.arms:
        arms.append(replace(each, by_seed={}) if each.label == label else each)
    kept = tuple(panel.kind.comparable(arms))
    return replace(LoadedPanel.of_arms(panel.spec, arms), arms=kept)


def test_verdicts_need_the_runs_of_their_own_arms_only() -> None:
    curves = without_runs(panel_of([], arm("a", -0.02), flat(), arm("c")), "c")
    assert [verdict.verdict for verdict in verdicts(less(""), curves)] == [HOLDS]
    with pytest.raises(NotTestableError, match="c"):
        verdicts(replace(less(""), b="c"), curves)
    sizes = without_runs(scaling_panel({"a": -0.08, "b": -0.05}), "a, 100000")
    assert [verdict.n for verdict in verdicts(less(""), sizes)] == [0, 3, 3, 3]
    with pytest.raises(NotTestableError, match="a, 100000"):  # a law needs all sizes
        verdicts(STEEPER, sizes)


def test_verdicts_of_a_panel_without_a_shared_seed_are_refused() -> None:
    a = arm("a", -0.02)
    moved = replace(a, by_seed={10 + seed: run for seed, run in a.by_seed.items()})
    for kind, panel_kind in (("lower", "scalar"), ("less", "curves"), ("efficiency", "curves")):
        panel = panel_of([], moved, flat(), kind=panel_kind, tag="val/loss")
        with pytest.raises(NotTestableError, match="seed"):
            verdicts(ClaimSpec(kind, "", a="a", b="b"), panel)


def figure_of(name: str, *panels: LoadedPanel, paper_scale: bool = False) -> Figure:
    spec = FigureSpec(name, name, "", [panel.spec for panel in panels])
    return Figure(spec, panels, paper_scale=paper_scale)


def test_evaluate_claims_verdicts_are_corrected_for_their_number() -> None:
    """Holm for one primary claim per figure, the first or the marked one.

    Benjamini-Hochberg for the others.
    """
    claims = {
        "1": [less("1"), less("1", margin=0.01, primary=True)],
        "2": [less("2")],
        "3": [less("3"), replace(less("3"), kind="not_less")],
    }
    scatter = {"1": (-0.02, 1), "2": (-0.0012, 1), "3": (-0.001, 20)}
    figures = []
    for name, (gap, times) in scatter.items():
        panel = panel_of(claims[name], wide(f"a{name}", gap, times), flat(f"b{name}"))
        figures.append(figure_of(name, panel))
    one, two, three = decide_claims(figures)
    primary = [one.verdicts[1], two.verdicts[0], three.verdicts[0]]
    others = [one.verdicts[0], three.verdicts[1]]
    for rule, together in ((holm, primary), (scipy_stats.false_discovery_control, others)):
        assert {verdict.primary for verdict in together} == {together is primary}
        p_values = [min(1.0, 2 * verdict.p) for verdict in together]  # of a claim and its opposite
        assert [verdict.p_corrected for verdict in together] == pytest.approx(list(rule(p_values)))
        for verdict in together:
            kept = verdict.verdict if verdict.p_corrected < 0.05 else NOT_RESOLVED
            assert verdict.corrected == kept
    assert (HOLDS, NOT_RESOLVED) in {(v.verdict, v.corrected) for v in primary}


def test_evaluate_claims_equal_parts_are_shown_once() -> None:
    """The last part of `leads` is `less`; the primary claim is the first."""
    claims = [ClaimSpec(kind, kind, a="a", b="b") for kind in ("less", "leads")]
    (found,) = decide_claims([figure_of("x", panel_of(claims, arm("a", -0.04), flat()))])
    assert [verdict.primary for verdict in found.verdicts] == [True, False, False, False]


@pytest.mark.parametrize(("paper_scale", "value", "agreement"), [
    (True, -0.0205, "consistent"),
    (True, -0.03, "not consistent"),
    (False, -0.02, ""),
])  # fmt: skip
def test_evaluate_claims_paper_value_is_compared_at_its_scale(
    paper_scale: bool, value: float, agreement: str
) -> None:
    claim = ClaimSpec("less", "0.02", a="a", b="b", paper_value=value)
    panel = panel_of([claim], arm("a", -0.02), flat())
    (found,) = decide_claims([figure_of("own", panel, paper_scale=paper_scale)])
    (verdict,) = found.verdicts
    assert verdict.agreement == agreement
    assert (verdict.paper_value is not None) == paper_scale


def test_holm_equals_the_hand_computation() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_pool_of_a_panel_is_without_the_runs_of_a_grid(tmp_path: Path) -> None:
    recorded = {}

    def planned(kind: str, *arms: Arm) -> PlannedPanel:
        needed = []
        for each in arms:
            run_spec = replace(SPEC, identity=json.dumps({"data": {}, "scale": each.label}))
            for seed, run in each.by_seed.items():
                recorded[run_spec.run_name(seed)] = run
            needed.append(PlannedArm(each.label, run_spec, seeds=each.seeds))
        return PlannedPanel(PanelSpec(kind, kind=kind), arms=tuple(needed))

    curves = planned("curves", arm("a", -0.02), flat())
    grid = planned("grid", wide("c", times=4), flat())
    runs = RunStore(tmp_path, recorded=recorded)
    (alone,) = load_panels([curves], runs)
    beside_a_grid, _ = load_panels([curves, grid], runs)
    assert beside_a_grid.difference(*alone.arms) == alone.difference(*alone.arms)


def test_pool_has_the_arms_that_are_compared() -> None:
    """Panels that share an arm have one pool; other panels have their own."""
    rng = np.random.default_rng(0)
    runs = {}
    for gap, (label, n) in enumerate({"a": 2, "b": 3, "c": 2, "x": 2, "y": 2}.items()):
        runs[label] = arm(label, gap, rng.normal(0, 0.01, n)).by_seed

    def pool_of(*panels: str) -> Pool:
        pool = Pool()
        for arms in panels:
            pool.add({label: runs[label] for label in arms})
        return pool

    pool = pool_of("ab", "bc", "xy")
    d = pool.difference("a", "c", FINAL, 0.9)
    assert d.mean == pytest.approx(-2.0, abs=0.05)
    assert (d.confidence, d.scatter) == (0.9, "scatter of 3 arms, 2 degrees of freedom")
    for a, b in (("x", "y"), ("a", "x")):
        assert pool.difference(a, b, FINAL, 0.9).scatter == ""

    runs["c"] = arm("c", math.nan).by_seed
    pool = pool_of("ab", "bc", "xy")
    assert pool.difference("a", "b", FINAL, 0.9).mean == pytest.approx(-1.0, abs=0.05)
    for a, b, value in (("c", "b", FINAL), ("a", "b", LossAt(0.01))):
        with pytest.raises(NotTestableError):
            pool.difference(a, b, value, 0.9)
