"""Each kind of claim on curves with a known result."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from lightning_sv.errors import NotTestableError
from lightning_sv.experiments.arms import Arm
from lightning_sv.experiments.claims.claim_types import KINDS
from lightning_sv.experiments.claims.corrections import benjamini_hochberg, correct_verdicts, holm
from lightning_sv.experiments.claims.decide import statement, verdicts
from lightning_sv.experiments.claims.pooling import FINAL, LossAt, Pool
from lightning_sv.experiments.evaluate import decide_claims
from lightning_sv.experiments.kinds.base import LoadedPanel, add_to_pool
from lightning_sv.experiments.kinds.table import throughput_table
from lightning_sv.experiments.report.claims import estimate_text
from lightning_sv.experiments.results import Figure, Verdict
from lightning_sv.experiments.run_spec import RunSpec
from lightning_sv.experiments.spec import ClaimSpec, FigureSpec, PanelSpec
from lightning_sv.runs.events import Curve, Run
from lightning_sv.statistics.block_anova import BlockDesign
from lightning_sv.statistics.paired import PairedDifference
from lightning_sv.statistics.verdicts import Outcome, directed

TOKENS = np.arange(100, 2001, 100)
ONES = np.ones(len(TOKENS))
NOISE = (0.001, -0.001, 0.0005, -0.0005)  # noise of the pairs, with mean zero
Q, V = "branch_norm/mean/q_proj/effective", "branch_norm/mean/v_proj/effective"
SPEED, MEMORY = "throughput/tokens_per_s", "memory/peak_gib"


def run(values: np.ndarray, **curves: np.ndarray) -> Run:
    tokens = (
        TOKENS[: len(values)] if len(values) <= len(TOKENS) else np.arange(1, len(values) + 1) * 100
    )
    named = {"val/loss": Curve(tokens, values)} | {k: Curve(tokens, v) for k, v in curves.items()}
    return Run(Path("run"), "x", {}, {}, named)


def arm(
    label: str,
    gap: np.ndarray | float = 0.0,
    noise: tuple[float, ...] = NOISE,
    **curves: np.ndarray,
) -> Arm:
    """Runs whose loss is 4 - tokens / 2000 + gap + the pair's noise."""
    runs = tuple(run(4 - TOKENS / 2000 + gap + x, **curves) for x in noise)
    return Arm(label, runs, ours=False, baseline=label == "b")


def flat(label: str = "b") -> Arm:
    return arm(label, noise=(0.0,) * 4)


def judge_all(kind: str, *arms: Arm, **fields: object) -> list[Verdict]:
    """Return one verdict per part of the claim."""
    panel = LoadedPanel.of_arms(PanelSpec("panel"), arms)
    return list(verdicts(ClaimSpec(kind, "0.028", a="a", b="b", **fields), panel))  # type: ignore[arg-type]


def judge(kind: str, *arms: Arm, **fields: object) -> Verdict:
    (found,) = judge_all(kind, *arms, **fields)
    return found


def words(kind: str, *arms: Arm, **fields: object) -> list[str]:
    return [verdict.verdict for verdict in judge_all(kind, *arms, **fields)]


def wide(label: str = "a", gap: np.ndarray | float = 0.0, times: float = 20.0) -> Arm:
    return arm(label, gap, tuple(times * x for x in NOISE))


def test_less_four_pairs_equal_the_hand_computation() -> None:
    found = judge("less", arm("a", -0.02), flat())
    se = np.std(NOISE, ddof=1) / 2
    half = scipy_stats.t.ppf(0.95, 3) * se
    assert found.verdict == "holds" and found.n == 4 and found.df == 3 and found.paper == "0.028"
    assert (found.estimate, found.low, found.high) == pytest.approx(
        (-0.02, -0.02 - half, -0.02 + half)
    )
    assert found.smallest == pytest.approx(half) and found.p == pytest.approx(
        scipy_stats.t.cdf(-0.02 / se, 3)
    )
    against = judge("less", arm("a", 0.02), flat())
    assert against.verdict == "contradicted" and against.p == pytest.approx(found.p)
    early = judge("less", arm("a", -0.02), flat(), until=0.5)
    assert early.verdict == "holds" and "50% of the tokens" in early.claim


def test_less_small_difference_is_equal_within_the_margin() -> None:
    """By two one-sided tests, if it has no direction; one with a direction holds, and its sentence
    has the margin."""
    none = judge("less", arm("a", 0.0001), flat())
    se = np.std(NOISE, ddof=1) / 2
    assert none.verdict == "equal within 0.01" and none.p == pytest.approx(
        scipy_stats.t.cdf(-0.0099 / se, 3), rel=1e-6
    )
    small = judge("less", arm("a", -0.005), flat())
    assert small.verdict == "holds" and small.sentence.endswith("4 pairs), which is within 0.01.")
    assert (
        words("less", wide(gap=0.0001), flat())
        == ["not resolved"]
        == words("not_less", wide(), flat())
    )
    assert words("not_less", arm("a", 0.0001), flat()) == ["equal within 0.01"]


@pytest.mark.parametrize(
    ("kind", "gap"), [("less", -0.012), ("less", 0.0), ("equal", 0.004), ("equal", 0.017)]
)
def test_pairs_to_go_simulated_decide_in_8_of_10_cases(kind: str, gap: float) -> None:
    """Simulated with the scatter of the sentence: claims below a margin, within one, and
    outside."""
    found = judge(kind, wide(gap=gap), flat(), margin=0.01 if kind == "equal" else 0.002)
    named = re.search(r"about ([\d,]+) pairs would decide a difference as large", found.sentence)
    assert found.verdict == "not resolved" and named
    n, sd = int(named[1].replace(",", "")), float(np.std([20 * x for x in NOISE], ddof=1))
    means = np.random.default_rng(0).normal(gap, sd / math.sqrt(n), 20_000)
    half = 1.6449 * sd / math.sqrt(n)
    if kind == "less":
        right = means + half < -0.002 if gap < -0.002 else means - half > -0.002
    else:
        right = abs(means) + half < 0.01 if gap < 0.01 else abs(means) - half > 0.01
    assert right.mean() == pytest.approx(0.8, abs=0.02)


def test_pairs_to_go_of_unequal_arms_have_the_scatter_of_a_pair() -> None:
    rng = np.random.default_rng(0)
    a, b, *others = (
        {seed: float(rng.normal(0, 0.1)) for seed in range(n)} for n in (12, 3, 12, 12, 12)
    )
    design = BlockDesign({"a": a, "b": b} | dict(enumerate(others)))
    d = replace(design.difference("a", "b", 0.9), mean=-0.03)
    named = re.search(r"about (\d+) pairs would decide", directed(d).to_go)
    assert d.se is not None and named
    needed = ((1.6449 + 0.8416) * math.sqrt(2 * design.pooled.variance) / 0.03) ** 2
    assert int(named[1]) == math.ceil(needed) and d.se < math.sqrt(2 * design.pooled.variance / 3)


@given(
    gap=st.floats(-0.1, 0.1),
    margin=st.floats(0, 0.05),
    noise=st.lists(st.floats(-0.05, 0.05), min_size=2, max_size=6),
)
def test_verdict_any_losses_follow_from_the_interval(
    gap: float, margin: float, noise: list[float]
) -> None:
    a, b = arm("a", gap, tuple(noise)), arm("b", noise=(0.0,) * len(noise))
    found = judge("less", a, b, margin=margin)
    if margin:
        equal = "holds" if -margin < found.low and found.high < margin else "not resolved"
        equal = "contradicted" if found.low > margin or found.high < -margin else equal
        assert judge("equal", a, b, margin=margin).verdict == equal
    none = "equal within 0.01" if found.low > -0.01 and found.high < 0.01 else "not resolved"
    expected = "holds" if found.high < -margin else "contradicted" if found.low > -margin else none
    assert found.verdict == expected
    assert (found.p < 0.05) == (expected != "not resolved") or found.p == pytest.approx(0.05)
    other = judge("not_less", a, b, margin=margin)
    assert {found.verdict, other.verdict} not in ({"holds"}, {"contradicted"})


APART = (
    "slope",
    "grid_gap",
    "sensitivity",
    "apart",
    "cost",
    "memory",
    "lower",
)  # claims of other panels or curves


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in APART])
def test_verdicts_one_pair_are_not_resolved(kind: str) -> None:
    gap = np.linspace(-0.5, 0.5, len(TOKENS))
    for sign in (1, -1):
        for found in judge_all(kind, arm("a", sign * gap, (0.0,)), arm("b", noise=(0.0,))):
            assert (found.verdict, found.n, found.low, found.p) == ("not resolved", 1, None, None)


def test_widens_is_a_difference_of_differences() -> None:
    change, lead = judge_all("widens", arm("a", -0.04 * TOKENS / 2000), flat(), at=0.5)
    assert (
        change.verdict == "holds"
        and change.estimate == pytest.approx(-0.02)
        and change.low == pytest.approx(-0.02)
    )
    assert (lead.claim, lead.verdict) == ("a ends below b", "holds")
    assert words("widens", arm("a", -0.04 + 0.02 * TOKENS / 2000), flat(), at=0.5) == [
        "contradicted",
        "holds",
    ]
    assert words("widens", arm("a", 0.1 - 0.04 * TOKENS / 2000), flat(), at=0.5) == [
        "holds",
        "contradicted",
    ]
    noisy = wide(gap=-0.04 * TOKENS / 2000, times=200)  # only its change is resolved
    assert words("widens", noisy, flat(), at=0.5) == ["holds", "not resolved"]


def test_widens_until_a_share_and_keeps_from_it() -> None:
    """The lead is 0.04 at 80% of the tokens, and 0.03 at the end."""
    gap = np.interp(TOKENS, [100, 1600, 2000], [0, -0.04, -0.03])
    change, lead = judge_all("widens", arm("a", gap), flat(), at=0.4, until=0.8)
    assert change.verdict == lead.verdict == "holds" and change.estimate == pytest.approx(
        -0.0213, abs=1e-4
    )
    _, kept = judge_all("keeps", arm("a", gap), flat(), at=0.8, margin=0.02)
    assert kept.verdict == "holds" and kept.estimate == pytest.approx(0.01)
    assert words("keeps", arm("a", gap), flat(), at=0.8, margin=0.005) == ["holds", "contradicted"]
    assert words("keeps", arm("a", 0.1), flat(), at=0.8, margin=0.005) == ["contradicted", "holds"]


def test_leads_has_one_part_per_quarter() -> None:
    found = judge_all("leads", arm("a", -0.04), flat())
    shares = [f"a is below b at {n}% of the tokens" for n in (25, 50, 75)]
    assert [v.claim for v in found] == [*shares, "a ends below b"]
    assert {v.verdict for v in found} == {"holds"}
    dip = arm("a", np.interp(TOKENS, [900, 1000, 1100], [-0.04, 0.02, -0.04]))
    assert words("leads", dip, flat()) == ["holds", "contradicted", "holds", "holds"]


def test_equal_longer_training_is_stated() -> None:
    longer = Arm("a", tuple(run(4 - np.arange(1, 29) / 20 + 0.405 + x) for x in NOISE))
    found = judge("equal", longer, flat(), margin=0.01)
    assert found.verdict == "holds" and found.estimate == pytest.approx(0.005)
    assert "with 1.40 times the tokens" in found.sentence
    assert judge("equal", longer, flat(), margin=0.001).verdict == "contradicted"


def test_efficiency_is_the_ratio_of_tokens() -> None:
    """A is 0.1 lower on a slope of 1/2000 per token, so it reaches the final loss of B 200 tokens
    earlier."""
    found = judge("efficiency", arm("a", -0.1), flat())
    assert found.verdict == "holds" and found.estimate == pytest.approx(2000 / 1800, rel=1e-4)
    assert found.low is not None and 1 < found.low < found.estimate
    every = (arm("a", -0.1), flat())
    panel = LoadedPanel.of_arms(PanelSpec("a third arm has two seeds"), every)
    panel = replace(panel, arms=tuple(each.on((0, 1)) for each in every))
    (again,) = verdicts(ClaimSpec("efficiency", "", a="a", b="b"), panel)
    assert (again.n, again.low) == (4, found.low)  # all pairs, as in the difference of final losses
    ends = (Arm(label, tuple(run(np.array([3 + x])) for x in NOISE)) for label in "ab")
    with pytest.raises(NotTestableError, match="a run has its final loss alone"):
        judge("efficiency", *ends)
    lucky = judge("efficiency", arm("a", -0.01, (0.0, 0.0, 0.0, 0.02)), flat())
    assert (
        "reaches b's final loss in 3 of 4 pairs: no token factor." in lucky.sentence
    )  # without pairs to go
    worse = judge("efficiency", arm("a", 0.1), flat())
    assert worse.verdict == "contradicted" and "in 0 of 4 pairs" in worse.sentence
    assert estimate_text(worse).startswith("the final loss: +0.1000 (") and estimate_text(
        found
    ).startswith("1.11 times (")


def test_apart_norms_compare_their_growth() -> None:
    """Q doubles and V halves, so that their logarithms are 2 ln 2 apart; equal growth contradicts
    the claim."""
    up, down = np.linspace(1, 2, len(TOKENS)), np.linspace(1, 0.5, len(TOKENS))

    def grown(q: np.ndarray, v: np.ndarray) -> Verdict:
        runs = tuple(run(4 - TOKENS / 2000, **{Q: q ** (1 + x), V: v ** (1 - x)}) for x in NOISE)
        return judge("apart", Arm("a", runs), tags=[Q, V], margin=0.1)

    found = grown(up, down)
    assert found.verdict == "holds" and found.estimate == pytest.approx(2 * math.log(2))
    named = ClaimSpec(kind="apart", paper="", a="a", tags=["grad_norm", "role/in"])
    assert "norms of grad_norm and role/in grow" in statement(named)
    assert "q_proj by 2.00 and v_proj by 0.50" in found.sentence
    assert grown(down, up).verdict == "holds" and found.unit == "in logarithms"
    assert grown(up, up).verdict == grown(up, up * 1.02).verdict == "contradicted"
    assert grown(up, np.linspace(1, 2 * math.exp(0.1), len(TOKENS))).verdict == "not resolved"


def scaling_panel(
    slopes: dict[str, float], sizes: tuple[float, ...] = (1e5, 2e5, 4e5, 8e5)
) -> LoadedPanel:
    """Power laws without a floor, with noise that grows with size; `b` is the baseline."""
    arms = []
    for label, slope in slopes.items():
        for n in sizes:
            made = [
                run(np.array([9 * (n / 1e5) ** slope * (1 + x * (n / 1e5))]))
                for x in (1e-4, -1e-4, 0.0)
            ]
            at = {"series": label, "point": (n,), "size": f"{n:g}"}
            arms.append(Arm(f"{label}, {n:g}", tuple(made), False, label == "b", **at))
    return LoadedPanel.of_arms(PanelSpec("sizes", kind="scaling"), tuple(arms))


def test_slope_is_that_of_the_joint_fit() -> None:
    claim, panel = (
        ClaimSpec("slope", "steeper", a="a", b="b"),
        scaling_panel({"a": -0.08, "b": -0.05}),
    )
    (found,) = verdicts(claim, panel)
    fit, _ = panel.fits[0]["a"]
    assert found.verdict == "holds" and found.estimate == pytest.approx(0.03, abs=1e-3)
    assert (found.estimate, found.low, found.high) == (
        fit.slope.mean,
        fit.slope.low,
        fit.slope.high,
    )
    near = scaling_panel({"a": -0.055, "b": -0.05})
    (weak,) = verdicts(claim, near)
    sides = [min(fit.slope.p_below(), fit.slope.p_above()) for fit in near.fits[0]["a"]]
    assert weak.p == pytest.approx(min(1.0, 2 * max(sides)))  # its 95% interval covers both sides
    each = verdicts(ClaimSpec("less", "lower", a="a", b="b"), panel)
    assert [v.claim for v in each][:2] == [
        "a, 100000 ends below b, 100000",
        "a, 200000 ends below b, 200000",
    ]
    assert [v.verdict for v in each] == ["equal within 0.01", "holds", "holds", "holds"]
    (other,) = verdicts(claim, scaling_panel({"a": -0.05, "b": -0.08}))
    assert other.verdict == "contradicted"
    (three,) = verdicts(claim, scaling_panel({"a": -0.08, "b": -0.05}, (1e5, 2e5, 4e5)))
    assert three.verdict == "not resolved"


def test_cost_and_memory_are_ratios_of_the_second_half() -> None:
    warm = np.where(np.arange(20) < 10, 5.0, 1.0)
    arms = []
    for label, r in (("a", 1.1), ("b", 1.0)):
        scalars = (
            {SPEED: 1e4 * warm ** (r - 1) * (1 + x) / r, MEMORY: 2 * r * ONES} for x in NOISE
        )
        arms.append(
            Arm(
                label,
                tuple(run(4 - TOKENS / 2000, **each) for each in scalars),
                baseline=label == "b",
            )
        )
    found = judge("cost", *arms, margin=1.2)
    assert found.verdict == "holds" and (found.estimate, found.low, found.high) == pytest.approx(
        (1.1, 1.1, 1.1)
    )
    assert judge("cost", *arms, margin=1.05).verdict == "contradicted"
    first, second = throughput_table(arms).frame.to_numpy().tolist()
    assert (first[0], *first[3:]) == ("a", "not stated", 4) and (second[0], *second[3:]) == (
        "b",
        "not stated",
        4,
    )
    assert second[1:3] == pytest.approx([1e4, 2.0])
    grown = judge("memory", *arms, margin=1.2)
    assert grown.verdict == "holds" and grown.estimate == pytest.approx(1.1)
    assert judge("memory", *arms, margin=1.05).verdict == "contradicted"


def test_lower_is_the_ratio_of_last_values() -> None:
    before = np.where(np.arange(20) < 19, 9.0, 1.0)
    log = np.log([1.01, 0.99, 1.02, 1.0])
    ends = {"a": 0.8 * np.exp(log) * 50, "b": np.full(4, 50.0)}

    def scalar(**of: np.ndarray) -> LoadedPanel:
        shape = {"a": before, "b": ONES}
        arms = (
            Arm(k, tuple(run(4 - TOKENS / 2000, sharp=x * shape[k]) for x in v))
            for k, v in of.items()
        )
        return LoadedPanel.of_arms(PanelSpec("sharpness", kind="scalar", tag="sharp"), tuple(arms))

    claim = ClaimSpec("lower", "bounded", a="a", b="b")
    (found,) = verdicts(claim, scalar(**ends))
    half = scipy_stats.t.ppf(0.95, 3) * log.std(ddof=1) / 2
    expected = np.exp(np.log(0.8) + log.mean() + np.array([0, -half, half]))
    assert (
        found.verdict == "holds"
        and found.unit == "times"
        and "ends lower in a than in b" in found.claim
    )
    assert (found.estimate, found.low, found.high) == pytest.approx(tuple(expected))
    (other,) = verdicts(replace(claim, a="b", b="a"), scalar(**ends))
    assert other.verdict == "contradicted"
    with pytest.raises(ValueError, match=r"sharp of run"):
        verdicts(claim, scalar(a=np.zeros(4), b=ends["b"]))
    with pytest.raises(ValueError, match="logged no scalar named 'sharp'"):
        verdicts(claim, LoadedPanel.of_arms(scalar().spec, [arm("a"), arm("b")]))


def grid(
    gap: float, noise: float, values: tuple[float, ...] = (1.0, 2.0, 4.0), narrow: float = 1.0
) -> LoadedPanel:
    """Two arms on three seeds: parabolas with their minimum at 2; `a` is lower by `gap` and
    `narrow` times as steep."""
    rng, arms = np.random.default_rng(1), []
    for label, offset, steep in (("b", 0.0, 1.0), ("a", gap, narrow)):
        for x in values:
            loss = offset + 0.05 * steep * math.log(x / 2.0) ** 2
            made = arm(
                f"{label}, lr {x:g}",
                loss,
                tuple(0.1 * seed + noise * rng.normal() for seed in range(3)),
            )
            arms.append(replace(made, series=label, point=(x,)))
    return LoadedPanel.of_arms(
        PanelSpec("grid", kind="grid", axes={"model.optim.lr": {}}), tuple(arms)
    )


@pytest.mark.parametrize(
    ("gap", "noise", "values", "word"),
    [
        (
            -0.02,
            0.002,
            (1.0, 2.0, 4.0),
            "holds",
        ),  # the seeds' own offsets, 0.1 apart, are common to both
        (0.02, 0.002, (1.0, 2.0, 4.0), "contradicted"),
        (-0.002, 0.03, (1.0, 2.0, 4.0), "not resolved"),
        (-0.02, 0.002, (2.0, 4.0, 8.0), "not resolved"),  # the lowest is at the grid's end
    ],
)
def test_grid_gap_optima_have_their_errors(
    gap: float, noise: float, values: tuple[float, ...], word: str
) -> None:
    panel = grid(gap, noise, values)
    (found,) = verdicts(ClaimSpec("grid_gap", "", a="a", b="b"), panel)
    assert found.verdict == word, found.sentence
    if values[0] == 1.0:
        samples = []  # with the mean, standard error and degrees of freedom of each optimum
        for o in (series.optimum for series in panel.series):
            sample = scipy_stats.zscore(np.arange(o.df + 1), ddof=1)
            samples.append(o.loss + (o.se or math.nan) * math.sqrt(o.df + 1) * sample)
        assert found.df == math.floor(scipy_stats.ttest_ind(*samples, equal_var=False).df) < 8
    if word != "not resolved":
        assert found.estimate == pytest.approx(gap, abs=0.005) and "a at lr 2" in found.sentence
    elif values[0] == 2.0:
        assert "lowest point" in found.sentence and found.low is None


@pytest.mark.parametrize(("steep", "word"), [(0.5, "holds"), (2.0, "contradicted")])
def test_sensitivity_is_the_mean_excess_over_the_lowest_loss(steep: float, word: str) -> None:
    claim, values = ClaimSpec("sensitivity", "", a="a", b="b"), (1.0, 2.0, 4.0, 16.0)
    (found,) = verdicts(claim, grid(-0.3, 0.001, values, steep))
    excess = 0.05 * float(np.mean(np.log(np.array(values) / 2) ** 2))
    assert found.verdict == word and found.estimate == pytest.approx(
        (steep - 1) * excess, abs=0.005
    )
    panel = grid(-0.3, 0.001, values, steep)
    *others, last = panel.arms
    lost = replace(last, runs=(), seeds=(), diverged=last.runs)
    with pytest.raises(NotTestableError, match="same points"):
        verdicts(claim, LoadedPanel.of_arms(panel.spec, [*others, lost]))
    ends = {
        "a1": (0.0, 0.2),
        "a2": (0.2, 0.0),
        "b1": (0.0, 0.0),
        "b2": (0.0, 0.0),
    }  # seeds of `a` have their own rate
    arms = [
        replace(arm(at, noise=losses), series=at[0], point=(float(at[1]),))
        for at, losses in ends.items()
    ]
    assert verdicts(claim, LoadedPanel.of_arms(panel.spec, arms))[0].estimate == pytest.approx(0.1)


def test_verdicts_run_ends_before_crossing_not_testable() -> None:
    panel = scaling_panel({"a": -0.08, "b": -0.05}, (1e5, 2e5))
    run_spec = RunSpec("tiny", "hg", "", (), "{}", 600, 600_000, 100_000, 1.0, None, "tiny")
    arms = []
    for each in panel.arms:
        steps = 599 if each.size == "100000" else 600
        arms.append(replace(each, run_spec=replace(run_spec, identity=each.label, steps=steps)))
    panel = LoadedPanel.of_arms(panel.spec, arms)
    short, enough = verdicts(ClaimSpec("less", "lower", a="a", b="b", crossing=600), panel)
    assert (short.verdict, enough.verdict) == ("not testable here", "holds")
    assert (
        "end after 599 steps, and a, 100000 is known to pass b, 100000 at about 600"
        in short.sentence
    )
    (steeper,) = verdicts(ClaimSpec("slope", "steeper", a="a", b="b", crossing=600), panel)
    assert steeper.verdict == "not testable here" and "end after 599 steps" in steeper.sentence


def figure_of(name: str, *panels: LoadedPanel) -> Figure:
    return Figure(
        FigureSpec(name, name, "", "", [p.spec for p in panels]), panels, paper_scale=name == "own"
    )


def panel_of(claims: list[ClaimSpec], *arms: Arm) -> LoadedPanel:
    return LoadedPanel.of_arms(PanelSpec("panel", claims=claims), arms)


def test_evaluate_claims_verdicts_are_corrected_for_their_number() -> None:
    """Holm for one primary claim per figure, the first or the marked one; Benjamini-Hochberg for
    the others."""
    figures = []
    for name, gap, times in (
        ("1", -0.02, 1),
        ("2", -0.0012, 1),
        ("3", -0.001, 20),
    ):  # arms that are not pooled
        less = ClaimSpec("less", "", a=f"a{name}", b=f"b{name}")
        more = {
            "1": [replace(less, margin=0.01, primary=True)],
            "3": [replace(less, kind="not_less")],
        }
        panel = panel_of([less, *more.get(name, [])], wide(less.a, gap, times), flat(less.b))
        figures.append(figure_of(name, panel))
    found = [verdict for figure in figures for verdict in decide_claims([figure])[0].verdicts]
    assert [v.primary for v in found] == [False, True, True, True, False]
    one, two, three = decide_claims(figures)
    primary, others = (
        [one.verdicts[1], two.verdicts[0], three.verdicts[0]],
        [one.verdicts[0], three.verdicts[1]],
    )
    for rule, together in ((holm, primary), (scipy_stats.false_discovery_control, others)):
        p_values = [min(1.0, 2 * v.p) for v in together]  # a claim and its opposite are two
        assert [v.p_corrected for v in together] == pytest.approx(list(rule(p_values)))
        for verdict in together:
            assert verdict.corrected == (
                verdict.verdict if verdict.p_corrected < 0.05 else "not resolved"
            )
    assert "not resolved" in {v.corrected for v in primary if v.verdict == "holds"}


@pytest.mark.long
@pytest.mark.parametrize("rule", [holm, benjamini_hochberg])
def test_corrected_equal_arms_false_in_5_percent_of_reports(
    rule: Callable[[list[float]], list[float]],
) -> None:
    """Simulated with 16 claims; without the factor of two for both sides, 10% would be false."""
    rng, wrong, once = np.random.default_rng(0), 0, 0
    reports = 2000
    for _ in range(reports):
        found = [
            PairedDifference(x, None, None, 1.0, 6, 0.9, 70).at(0.9) for x in rng.standard_t(70, 16)
        ]
        verdicts_ = [
            plain_verdict(f"claim {i}", directed(d), primary=rule is holm)
            for i, d in enumerate(found)
        ]
        (figure,) = correct_verdicts(
            [replace(figure_of("f", panel_of([], flat())), verdicts=tuple(verdicts_))]
        )
        wrong += any(v.corrected != "not resolved" for v in figure.verdicts)
        once += min(rule([v.p for v in verdicts_ if v.p is not None])) < 0.05
    assert wrong / reports == pytest.approx(0.05, abs=0.015) and once / reports > 0.08


def test_corrected_two_sided_claim_counts_once() -> None:
    """It needs p below 5%, and a one-sided claim p below 2.5%."""
    for sides, word in ((2, "holds"), (1, "not resolved")):
        verdict = replace(plain_verdict("c", Outcome("holds", 0.04), primary=True), sides=sides)
        (found,) = correct_verdicts(
            [replace(figure_of("f", panel_of([], flat())), verdicts=(verdict,))]
        )
        assert found.verdicts[0].corrected == word


def plain_verdict(claim: str, outcome: Outcome, *, primary: bool) -> Verdict:
    return Verdict(
        claim, outcome.word, "", 0.0, None, None, 6, None, "", p=outcome.p, primary=primary
    )


def test_evaluate_claims_equal_parts_are_shown_once() -> None:
    """The last part of `leads` is `less`; the primary claim is the first."""
    claims = [ClaimSpec(kind, kind, a="a", b="b") for kind in ("less", "leads")]
    (found,) = decide_claims([figure_of("x", panel_of(claims, arm("a", -0.04), flat()))])
    assert [v.claim for v in found.verdicts] == [
        "a ends below b", *(f"a is below b at {n}% of the tokens" for n in (25, 50, 75)),
    ]  # fmt: skip
    assert [v.primary for v in found.verdicts] == [True, False, False, False]


def test_evaluate_claims_of_sizes_primary_is_the_largest() -> None:
    spec = PanelSpec("sizes", kind="scaling", claims=[ClaimSpec("less", "", a="a", b="b")])
    (found,) = decide_claims(
        [figure_of("x", replace(scaling_panel({"a": -0.08, "b": -0.05}), spec=spec))]
    )
    assert [v.claim for v in found.verdicts if v.primary] == ["a, 800000 ends below b, 800000"]


def test_evaluate_claims_paper_value_is_compared_at_its_scale() -> None:
    def ours(name: str, value: float) -> Verdict:
        claim = ClaimSpec("less", "0.02", a="a", b="b", paper_value=value)
        return decide_claims([figure_of(name, panel_of([claim], arm("a", -0.02), flat()))])[
            0
        ].verdicts[0]

    inside, outside, another = ours("own", -0.0205), ours("own", -0.03), ours("cpu", -0.02)
    assert inside.agreement == "consistent" and inside.sentence.endswith(
        "4 pairs); the paper's -0.0205 lies inside."
    )
    assert outside.agreement == "not consistent" and outside.sentence.endswith(
        "the paper's -0.03 lies outside."
    )
    assert (another.agreement, another.paper_value) == (
        "",
        None,
    ) and "the paper's" not in another.sentence


def test_holm_equals_the_hand_computation() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_pool_of_a_panel_is_without_the_runs_of_a_grid() -> None:
    curves = panel_of([], arm("a", -0.02), flat())
    alone = curves.difference(*curves.arms)
    both = Pool()
    add_to_pool(both, curves.spec, curves.every)
    add_to_pool(both, PanelSpec("grid", kind="grid"), (wide(), flat()))
    assert replace(curves, pool=both).difference(*curves.arms) == alone


def test_pool_has_the_arms_that_are_compared() -> None:
    """Panels that share an arm have one pool; other panels have their own."""
    rng, sizes = np.random.default_rng(0), {"a": 2, "b": 3, "c": 2, "x": 2, "y": 2}
    runs = {
        label: dict(enumerate(arm(label, gap, tuple(rng.normal(0, 0.01, n))).runs))
        for gap, (label, n) in enumerate(sizes.items())
    }

    def pool_of(*panels: str) -> Pool:
        pool = Pool()
        for arms in panels:
            pool.add({label: runs[label] for label in arms})
        return pool

    pool = pool_of("ab", "bc", "xy")
    d = pool.difference("a", "c", FINAL, 0.9)
    assert d.mean == pytest.approx(-2.0, abs=0.05) and d.confidence == 0.9
    assert d.scatter == "scatter of 3 arms, 2 degrees of freedom"
    assert (
        pool.difference("x", "y", FINAL, 0.9).scatter
        == ""
        == pool.difference("a", "x", FINAL, 0.9).scatter
    )
    runs["c"] = dict(enumerate(arm("c", math.nan).runs))
    pool = pool_of("ab", "bc", "xy")
    assert pool.difference("a", "b", FINAL, 0.9).mean == pytest.approx(-1.0, abs=0.05)
    with pytest.raises(NotTestableError, match="run diverged"):
        pool.difference("c", "b", FINAL, 0.9)
    with pytest.raises(NotTestableError, match="validation loss"):
        pool.difference("a", "b", LossAt(0.01), 0.9)
