"""Kinds of claims that runs can check, and their estimates from the runs of a panel, with intervals and sentences.

A - B is a difference of validation losses, nats per token, over runs of equal seed and data, with the scatter of all
arms of their pool (`pooling`). A claim with several statements has several parts.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from lightning_sv.errors import NotTestableError
from lightning_sv.experiments.arms import Arm, fit_series
from lightning_sv.experiments.claims.pooling import LossAt
from lightning_sv.experiments.kinds.base import LoadedPanel
from lightning_sv.experiments.spec import ClaimSpec, PanelSpec
from lightning_sv.runs.events import Run
from lightning_sv.statistics.optimum import Optimum
from lightning_sv.statistics.paired import (
    PairedDifference,
    paired_difference,
    percent,
    token_efficiency,
)
from lightning_sv.statistics.scaling import FEWEST_SIZES
from lightning_sv.statistics.verdicts import (
    CONFIDENCE,
    CONTRADICTED,
    HOLDS,
    MARGIN,
    NOT_RESOLVED,
    Outcome,
    below,
    directed,
    directed_or_equal,
    equivalent,
    inside,
    interval,
    opposite,
    pairs_words,
    times,
)


class Estimate(NamedTuple):
    """Estimate of the quantity of a claim.

    Attributes:
        part: measured quantity, if the claim does not name it, e.g. `the final loss`
        sides: 2 if the error of the interval covers both sides, so that the opposite needs no test
        tested: logarithms of a ratio, if they are tested instead of `d`
        outcome: result, if the kind of claim has no separate test
    """

    d: PairedDifference
    detail: str
    unit: str = "nats per token"
    part: str = ""
    sides: int = 1
    tested: PairedDifference | None = None
    outcome: Outcome | None = None


def _two(claim: ClaimSpec, panel: LoadedPanel) -> tuple[Arm, Arm, str]:
    a, b = panel.paired(panel.arm(claim.a), panel.arm(claim.b))
    return a, b, f"{claim.a} - {claim.b}"


def loss(claim: ClaimSpec, panel: LoadedPanel) -> Estimate:
    """A - B at the end or at a share of the tokens; A may have trained longer."""
    a, b, name = _two(claim, panel)
    d = panel.difference(a, b, LossAt(claim.until))
    at = "" if claim.until == 1 else f"at {claim.until:.0%} of the tokens "
    share = float(np.mean([x.tokens / y.tokens for x, y in zip(a.runs, b.runs, strict=True)]))
    longer = f"with {share:.2f} times the tokens " if abs(share - 1) > 0.01 else ""
    small = (
        below(d, -claim.margin) == HOLDS and claim.margin < MARGIN and inside(d, MARGIN) == HOLDS
    )
    return Estimate(d, f"{at}{longer}{interval(d, name)}{f', which is within {MARGIN:g}' * small}")


def change(claim: ClaimSpec, panel: LoadedPanel) -> Estimate:
    """Change of A - B between two shares of the tokens."""
    a, b, name = _two(claim, panel)
    d = panel.difference(a, b, LossAt(claim.until, claim.at))
    early, late = (panel.difference(a, b, LossAt(share)).mean for share in (claim.at, claim.until))
    to = "the end" if claim.until == 1 else f"{claim.until:.0%}"
    words = f"the change of {name} from {claim.at:.0%} of the tokens to {to}, {early:+.3f} to {late:+.3f},"
    return Estimate(d, interval(d, words))


def efficiency(claim: ClaimSpec, panel: LoadedPanel) -> Estimate:
    """Ratio of the tokens of B to those of A at the final loss of B, within the schedule of A."""
    a, b, _ = _two(claim, panel)
    e = token_efficiency(b.curves, a.curves, CONFIDENCE)
    if e.why_not:
        raise NotTestableError(e.why_not)
    if e.factor is None:
        at_end = panel.difference(a, b)
        n = sum(tokens is not None for tokens in e.tokens_b)
        reached = f"{a.label} reaches {b.label}'s final loss in {n} of {e.n} pairs: no token factor"
        word = CONTRADICTED if below(at_end) == CONTRADICTED else NOT_RESOLVED
        found = directed(at_end)._replace(word=word, p=at_end.p_above())
        if at_end.mean <= 0:
            found = found._replace(
                to_go=""
            )  # more pairs do not help if one does not reach the loss
        return Estimate(at_end, reached, part="the final loss", outcome=found)
    tokens_a, tokens_b = (
        [math.log(t) for t in of if t is not None] for of in (e.tokens_a, e.tokens_b)
    )
    d = paired_difference(tokens_a, tokens_b, CONFIDENCE)
    level = percent(CONFIDENCE)
    within = (
        f"{level} interval {e.low:.2f} to {e.high:.2f}, {e.n} pairs"
        if e.low
        else "one pair, no interval"
    )
    words = f"within one schedule {b.label} needs {e.factor:.2f} times the tokens of {a.label} for its final loss"
    return Estimate(
        replace(d, mean=e.factor, low=e.low, high=e.high), f"{words} ({within})", "times", tested=d
    )


def growths_apart(claim: ClaimSpec, panel: LoadedPanel) -> Estimate:
    """Logarithm of the ratio of the factors by which two norms grow."""
    arm = panel.arm(claim.a)
    one, two = (
        [math.log(c.values[-1] / c.values[0]) for c in (run.curve(t) for run in arm.runs)]
        for t in claim.tags
    )
    d = paired_difference(two, one, CONFIDENCE)
    names = [tag.split("/")[-2] for tag in claim.tags]
    grown = " and ".join(
        f"{name} by {math.exp(np.mean(x)):.2f}" for name, x in zip(names, (one, two), strict=True)
    )
    detail = f"{arm.label} from its first to its last norm: {grown}; {interval(d, 'the logarithms apart', '')}"
    return Estimate(d, detail, "in logarithms")


def slope(claim: ClaimSpec, panel: LoadedPanel) -> Estimate:
    """Difference of slopes in the joint fits; both forms must agree, because no interval has the error of the form."""
    a, b = (
        next(each for each in panel.series if each.label == label) for label in (claim.a, claim.b)
    )
    fits, sizes = fit_series(b, a), len(b.arms)
    outcomes = [opposite(directed(fit.slope)) for fit in fits]
    words = {outcome.word for outcome in outcomes}
    word = next(iter(words)) if len(words) == 1 and sizes >= FEWEST_SIZES else NOT_RESOLVED
    name = {"power": "the exponent of the power law", "log-linear": "the slope in ln N"}
    detail = "; ".join(
        interval(fit.slope, f"{name[fit.form]}, {claim.a} - {claim.b},", "") for fit in fits
    )
    detail = f"{detail}; above 0 {claim.a} falls faster, over {sizes} sizes"
    least = max(outcomes, key=lambda outcome: outcome.p)._replace(word=word)
    if sizes < FEWEST_SIZES or {HOLDS, CONTRADICTED} <= words:
        least = least._replace(
            to_go=""
        )  # more pairs do not help: sizes are missing, or the forms disagree
    return Estimate(fits[0].slope, detail, "in the exponent", sides=2, outcome=least)


def grid_gap(claim: ClaimSpec, panel: LoadedPanel) -> Estimate:
    """Difference of the losses at the optima of A and B, on the same seeds."""
    optima = {series.label: series.optimum for series in panel.series}
    a, b = optima[claim.a], optima[claim.b]
    d = _of_optima(a, b, len(panel.arms[0].runs))
    where = "; ".join(
        optimum_words(label, optima[label], panel.spec.axes) for label in (claim.a, claim.b)
    )
    outcome = None
    if a.why_not or b.why_not:  # the sentence has the reason
        outcome = directed_or_equal(d, -claim.margin)._replace(word=NOT_RESOLVED, to_go="")
    return Estimate(
        d, f"{interval(d, f'{claim.a} - {claim.b}')}, each at its optimum: {where}", outcome=outcome
    )


def _of_optima(a: Optimum, b: Optimum, n: int) -> PairedDifference:
    """A - B of two fits to runs on the same n seeds, with Welch's degrees of freedom."""
    d = a.loss - b.loss
    if not a.se or not b.se:
        return PairedDifference(d, None, None, None, n, CONFIDENCE, 0)
    se = math.hypot(a.se, b.se)
    df = int(se**4 / (a.se**4 / a.df + b.se**4 / b.df))
    return PairedDifference(d, None, None, se, n, CONFIDENCE, df).at(CONFIDENCE)


#: nats per token above the lowest loss at which a learning rate still counts as stable
STABLE = 0.1


def lr_sensitivity(claim: ClaimSpec, panel: LoadedPanel) -> Estimate:
    """A - B of the mean over the grid of loss - lowest loss, per seed (learning rate sensitivity, arXiv:2309.14322)."""
    series = {each.label: each for each in panel.series}
    a, b = series[claim.a], series[claim.b]
    diverged = {arm.series for arm in panel.every if arm.diverged}
    if diverged & {a.label, b.label} or [arm.point for arm in a.arms] != [
        arm.point for arm in b.arms
    ]:
        raise NotTestableError(
            f"{a.label} and {b.label} have no runs at the same points; a rate has diverged."
        )
    raised: list[list[float]] = []
    stable: list[str] = []
    for each in (a, b):
        losses = np.stack([arm.losses for arm in each.arms])
        raised.append((losses - losses.min(axis=0)).mean(axis=0).tolist())
        means = losses.mean(axis=1)
        last = max(
            arm.point[0]
            for arm, mean in zip(each.arms, means, strict=True)
            if mean <= means.min() + STABLE
        )
        stable.append(
            f"{each.label} {np.mean(raised[-1]):.3f}, within {STABLE:g} of its lowest loss up to {last:g}"
        )
    d = paired_difference(raised[1], raised[0], CONFIDENCE)
    gap = interval(d, f"{a.label} - {b.label}")
    return Estimate(d, f"mean excess over the lowest loss: {'; '.join(stable)}; {gap}")


def optimum_words(label: str, o: Optimum, axes: Iterable[str]) -> str:
    """`llama at lr 0.011 (times or over 1.05), init_std 0.018 (1.09)`; without a fit, why."""
    at = ", ".join(
        f"{key.rpartition('.')[2]} {value:.3g}"
        + (f" (times or over {math.exp(error):.2f})" if error > 0 else "")
        for key, value, error in zip(axes, o.values, o.errors, strict=True)
    )
    return f"{label} at {at}" + (f", its lowest point: {o.why_not}" if o.why_not else "")


def ratio(
    claim: ClaimSpec, panel: LoadedPanel, what: str, tag: str, *, last: bool = False, power: int = 1
) -> Estimate:
    """A / B of a power of a logged scalar: of its last value, or of its median in the second half of the run."""

    def log(run: Run) -> float:
        values = run.curve(tag).values
        value = float(values[-1] if last else np.median(values[len(values) // 2 :]))
        if not value > 0:
            raise NotTestableError(
                f"{tag} of {run.dir} is {value:g}; expected a number above 0 for a ratio."
            )
        return power * math.log(value)

    a, b, _ = _two(claim, panel)
    d = paired_difference([log(r) for r in b.runs], [log(r) for r in a.runs], CONFIDENCE)
    low, high = (None if end is None else math.exp(end) for end in (d.low, d.high))
    ends = "the only pair, no interval"
    if low is not None and high is not None:
        ends = f"{percent(d.confidence)} interval {times(low)} to {times(high)}, {pairs_words(d)}"
    shown = replace(d, mean=math.exp(d.mean), low=low, high=high)
    detail = f"{what} of {a.label} is {times(shown.mean)} times that of {b.label} ({ends})"
    return Estimate(shown, detail, "times", tested=d)


def _below(d: PairedDifference, margin: float) -> Outcome:
    return directed_or_equal(d, -margin)


def _not_below(d: PairedDifference, margin: float) -> Outcome:
    return opposite(directed_or_equal(d, -margin))


class ClaimType(NamedTuple):
    """One kind of claim.

    Attributes:
        statement: template of the statement
        measure: function that estimates the quantity of the claim from the runs of a panel
        test: test of the estimate with the margin of the claim, in the unit of the estimate, or of their logarithms:
            below -margin (or equal), not below it, below +margin, inside or outside +-margin; unused if the measure
            has its own
        needs: returns a sentence on the missing key of a claim, else None
        parts: returns the claims of which it consists, each with its own verdict
    """

    statement: str
    measure: Callable[[ClaimSpec, LoadedPanel], Estimate]
    test: Callable[[PairedDifference, float], Outcome]
    needs: Callable[[ClaimSpec, PanelSpec], str | None] = lambda claim, panel: None
    parts: Callable[[ClaimSpec], tuple[ClaimSpec, ...]] = lambda claim: (claim,)


def _two_tags_apart(claim: ClaimSpec, panel: PanelSpec) -> str | None:
    if len(claim.tags) == 2 and all(tag.count("/") > 1 for tag in claim.tags) and claim.margin > 0:
        return None
    return f"two tags, e.g. branch_norm/mean/q_proj/effective, and a margin; it has {claim.tags} and {claim.margin:g}"


def _margin(claim: ClaimSpec, panel: PanelSpec) -> str | None:
    example = "0.01 nats per token" if claim.kind == "equal" else "1.05 times"
    return None if claim.margin > 0 else f"a margin above 0, e.g. {example}"


def _lower(claim: ClaimSpec, share: float) -> ClaimSpec:
    """Return the claim that A is below B at a share of the tokens, as a part of a claim."""
    return replace(claim, kind="less", until=share, margin=0.0, text=None, paper_value=None)


#: name in conf/paper -> kind
KINDS: dict[str, ClaimType] = {
    "less": ClaimType("{a} {ends} below {b}{more}", loss, _below),
    "not_less": ClaimType("{a} does not end below {b}{more}", loss, _not_below),
    "equal": ClaimType("{a} ends within {margin:g} of {b}", loss, equivalent, needs=_margin),
    "leads": ClaimType(
        "{a} is below {b} at each quarter of the tokens",
        loss,
        _below,
        parts=lambda claim: tuple(_lower(claim, share) for share in (0.25, 0.5, 0.75, 1.0)),
    ),
    "widens": ClaimType(
        "{a} gains on {b} from {at:.0%} to {until:.0%} of the tokens",
        change,
        _below,
        parts=lambda claim: (claim, _lower(claim, claim.until)),
    ),
    "keeps": ClaimType(
        "the lead of {a} over {b} shrinks by less than {margin:g} after {at:.0%} of the tokens",
        change,
        directed,
        parts=lambda claim: (_lower(claim, claim.at), claim),
    ),
    "efficiency": ClaimType(
        "{a} reaches the final loss of {b} with fewer tokens", efficiency, directed
    ),
    "apart": ClaimType(
        "in {a} the norms of {tags} grow or shrink at rates more than {margin:.0%} apart",
        growths_apart,
        lambda d, margin: opposite(equivalent(d, margin)),
        _two_tags_apart,
    ),
    "lower": ClaimType(
        "it ends lower in {a} than in {b}",
        lambda claim, panel: ratio(claim, panel, panel.spec.tag, panel.spec.tag, last=True),
        directed,
    ),
    "slope": ClaimType(
        "the loss of {a} falls faster with size than that of {b}", slope, _not_below
    ),
    "grid_gap": ClaimType("{a} ends below {b}{more}, each at its own optimum", grid_gap, _below),
    "sensitivity": ClaimType(
        "the loss of {a} depends less on the learning rate than that of {b}",
        lr_sensitivity,
        directed,
        lambda claim, panel: (
            None if [*panel.axes] == ["model.optim.lr"] else "the axis model.optim.lr alone"
        ),
    ),
    "cost": ClaimType(
        "a step of {a} takes less than {margin:g} times that of {b}",
        partial(ratio, what="time of a step", tag="throughput/tokens_per_s", power=-1),
        directed,
        _margin,
    ),
    "memory": ClaimType(
        "{a} needs less than {margin:g} times the memory of {b}",
        partial(ratio, what="peak memory", tag="memory/peak_gib"),
        directed,
        _margin,
    ),
}
