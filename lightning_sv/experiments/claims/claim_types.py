"""Kinds of claims, and their estimates from the runs of a panel, with intervals and sentences.

A - B is a difference of validation losses, nats per token, over runs of equal seed and data, with
the scatter of all arms of their pool (`pooling`). A claim with several statements has several
parts.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from lightning_sv.errors import NotTestableError
from lightning_sv.experiments.arms import Arm, Series, paired_losses
from lightning_sv.experiments.claims.pooling import LossAt
from lightning_sv.experiments.kinds.base import LoadedPanel
from lightning_sv.experiments.spec import ClaimSpec
from lightning_sv.runs.events import Run
from lightning_sv.statistics.line import difference_line
from lightning_sv.statistics.optimum import Optimum
from lightning_sv.statistics.paired import (
    PairedDifference,
    paired_difference,
    percent,
    token_efficiency,
    welch_df,
)
from lightning_sv.statistics.verdicts import (
    CONFIDENCE,
    HOLDS,
    MARGIN,
    Outcome,
    directed,
    directed_or_equal,
    equivalent,
    interval,
    opposite,
    pairs_words,
    ratio_interval_text,
    times,
    tokens_words,
    verdict_below,
    verdict_inside,
)


class Estimate(NamedTuple):
    """Estimate of the quantity of a claim.

    Attributes:
        tested: logarithms of a ratio, if they are tested instead of `d`
    """

    d: PairedDifference
    detail: str
    unit: str = "nats per token"
    tested: PairedDifference | None = None


def _paired_arms(claim: ClaimSpec, panel: LoadedPanel) -> tuple[Arm, Arm]:
    """Return A and B on the seeds that they share."""
    return panel.paired(panel.arm(claim.a), panel.arm(claim.b))


def _difference_name(claim: ClaimSpec) -> str:
    return f"{claim.a} - {claim.b}"


def branch_of(tag: str) -> str:
    """Return `q_proj` of `branch_norm/mean/q_proj/effective`; other tags are their own names."""
    if tag.count("/") < 2:
        return tag
    return tag.split("/")[-2]


def _series_of(claim: ClaimSpec, panel: LoadedPanel) -> tuple[Series, Series]:
    series = {each.label: each for each in panel.series}
    return series[claim.a], series[claim.b]


def loss(claim: ClaimSpec, panel: LoadedPanel) -> Estimate:
    """A - B at the end or at a share of the tokens; A may have trained longer."""
    a, b = _paired_arms(claim, panel)
    d = panel.difference(a, b, LossAt(claim.until))
    detail = interval(d, _difference_name(claim))
    tokens_a = [run.tokens for run in a.runs]
    tokens_b = [run.tokens for run in b.runs]
    share = np.divide(tokens_a, tokens_b).mean()  # over the pairs
    if abs(share - 1) > 0.01:
        detail = f"with {share:.2f} times the tokens {detail}"
    if claim.until < 1:
        detail = f"at {claim.until:.0%} of the tokens {detail}"
    is_below = verdict_below(d, -claim.margin) == HOLDS
    is_equal = verdict_inside(d, MARGIN) == HOLDS
    if is_below and claim.margin < MARGIN and is_equal:
        detail += f", which is within {MARGIN:g}"
    return Estimate(d, detail)


def change(claim: ClaimSpec, panel: LoadedPanel) -> Estimate:
    """Change of A - B between two shares of the tokens."""
    a, b = _paired_arms(claim, panel)
    name = _difference_name(claim)
    d = panel.difference(a, b, LossAt(claim.until, since=claim.at))
    early = panel.difference(a, b, LossAt(claim.at)).mean
    late = early + d.mean
    end = f"{claim.until:.0%}"
    if claim.until == 1:
        end = "the end"
    shares = f"from {claim.at:.0%} of the tokens to {end}"
    return Estimate(d, interval(d, f"the change of {name} {shares}, {early:+.3f} to {late:+.3f},"))


def efficiency(claim: ClaimSpec, panel: LoadedPanel) -> Estimate:
    """Tokens of B over those of A at the higher final loss, within one schedule."""
    a, b = _paired_arms(claim, panel)
    e = token_efficiency(b.curves_on_same_sequences, a.curves_on_same_sequences, CONFIDENCE)
    if e.why_not:
        raise NotTestableError(e.why_not)

    # ln(A / B), below 0 if the claim holds; the claim's B comes first in `e`
    tested = paired_difference(np.log(e.tokens_b), np.log(e.tokens_a), CONFIDENCE)
    shown = replace(tested, mean=e.factor, low=e.low, high=e.high)
    detail = f"within one schedule {tokens_words(b.label, a.label, e, CONFIDENCE)}"
    return Estimate(shown, detail, "times", tested=tested)


def growths_apart(claim: ClaimSpec, panel: LoadedPanel) -> Estimate:
    """Logarithm of the ratio of the factors by which two norms grow."""
    arm = panel.arm(claim.a)
    first, second = claim.tags
    growths = {tag: _log_growths(arm, tag) for tag in claim.tags}
    d = paired_difference(growths[first], growths[second], CONFIDENCE)
    factors = []
    for tag, logarithms in growths.items():
        factors.append(f"{branch_of(tag)} by {math.exp(np.mean(logarithms)):.2f}")
    grown = f"{arm.label} from its first to its last norm: {' and '.join(factors)}"
    return Estimate(d, f"{grown}; {interval(d, 'the logarithms apart', '')}", "in logarithms")


def _log_growths(arm: Arm, tag: str) -> list[float]:
    """Return the logarithm of the last over the first value of each run."""
    growths = []
    for run in arm.runs:
        values = run.curve(tag).values
        first = _positive(values[0], run, tag)
        last = _positive(values[-1], run, tag)
        growths.append(math.log(last / first))
    return growths


def _positive(value: float, run: Run, tag: str) -> float:
    """Return a value of a scalar whose ratio is measured.

    Raises:
        NotTestableError: it is not above 0
    """
    if not value > 0:
        found = f"{tag} of {run.dir} is {value:g}"
        raise NotTestableError(f"{found}; expected a number above 0 for a ratio.")
    return float(value)


def slope(claim: ClaimSpec, panel: LoadedPanel) -> Estimate:
    """Slope of A - B in ln N: below 0, the loss of A falls faster.

    Raises:
        NotTestableError: there is one size, or no seed has runs of both at all sizes
    """
    a, b = _series_of(claim, panel)
    line = difference_line(b.values, *paired_losses(b, a), CONFIDENCE)
    unit = "nats per token per e-fold of size"
    change = interval(line.slope, f"the change of {_difference_name(claim)}", unit)
    return Estimate(line.slope, f"over {len(b.arms)} sizes {change}", unit)


def grid_gap(claim: ClaimSpec, panel: LoadedPanel) -> Estimate:
    """Difference of the losses at the optima of A and B, on the same seeds.

    It has no interval, and is not resolved, if one of them has no fit.
    """
    series_a, series_b = _series_of(claim, panel)
    a = series_a.optimum
    b = series_b.optimum
    d = _of_optima(a, b, len(panel.arms[0].runs))
    axes = panel.spec.axes
    places = f"{optimum_words(claim.a, a, axes)}; {optimum_words(claim.b, b, axes)}"
    gap = interval(d, _difference_name(claim))
    return Estimate(d, f"{gap}, each at its optimum: {places}")


def _of_optima(a: Optimum, b: Optimum, n: int) -> PairedDifference:
    """A - B of two fits to runs on the same n seeds, with Welch's degrees of freedom."""
    d = a.loss - b.loss
    has_errors = a.se > 0 and b.se > 0
    if not has_errors:
        return PairedDifference.student(d, math.nan, n=n, confidence=CONFIDENCE, df=0)
    se = math.hypot(a.se, b.se)
    df = welch_df([a.se**2, b.se**2], [a.df, b.df])
    return PairedDifference.student(d, se, n=n, confidence=CONFIDENCE, df=df)


#: nats per token above the lowest loss at which a learning rate still counts as stable
STABLE = 0.1


def lr_sensitivity(claim: ClaimSpec, panel: LoadedPanel) -> Estimate:
    """A - B of the mean over the grid of loss - lowest loss, per seed.

    This is the learning rate sensitivity of arXiv:2309.14322.

    Raises:
        NotTestableError: the arms have no runs at the same points
    """
    a, b = _series_of(claim, panel)
    has_diverged = any(arm.diverged for arm in panel.all_arms)
    if has_diverged or a.points != b.points:
        found = f"{a.label} and {b.label} have no runs at the same points"
        raise NotTestableError(f"{found}; a rate has diverged.")

    d = paired_difference(_excess_losses(a), _excess_losses(b), CONFIDENCE)
    parts = [_excess_words(a), _excess_words(b), interval(d, _difference_name(claim))]
    return Estimate(d, f"mean excess over the lowest loss: {'; '.join(parts)}")


def _excess_words(series: Series) -> str:
    mean = np.mean(_excess_losses(series))
    within = f"within {STABLE:g} of its lowest loss up to {_largest_stable(series):g}"
    return f"{series.label} {mean:.3f}, {within}"


def _excess_losses(series: Series) -> list[float]:
    """Return the mean over the grid of loss - lowest loss, per seed."""
    losses = series.losses
    excess: list[float] = (losses - losses.min(axis=0)).mean(axis=0).tolist()
    return excess


def _largest_stable(series: Series) -> float:
    """Return the largest rate whose mean loss is within `STABLE` of the lowest one."""
    means = series.losses.mean(axis=1)
    is_stable = means <= means.min() + STABLE
    return float(np.array(series.values)[is_stable].max())


def optimum_words(label: str, o: Optimum, axes: Iterable[str]) -> str:
    """`llama at lr 0.011 (times or over 1.05), init_std 0.018 (1.09)`; without a fit, why."""
    values = []
    for key, value, error in zip(axes, o.values, o.errors, strict=True):
        setting = f"{key.rpartition('.')[2]} {value:.3g}"
        if error > 0:
            setting += f" (times or over {math.exp(error):.2f})"
        values.append(setting)
    place = f"{label} at {', '.join(values)}"
    if o.why_not:
        place += f", its lowest point: {o.why_not}"
    return place


def last_ratio(claim: ClaimSpec, panel: LoadedPanel) -> Estimate:
    """A / B of the last value of the scalar of the panel."""
    return ratio(claim, panel, panel.spec.tag, panel.spec.tag, last=True)


def ratio(
    claim: ClaimSpec,
    panel: LoadedPanel,
    what: str,
    tag: str,
    *,
    last: bool = False,
    power: int = 1,
) -> Estimate:
    """A / B of a power of a logged scalar.

    Args:
        claim: claim on A and B
        panel: panel with their runs
        what: name of the quantity
        tag: name of the scalar
        last: if True, its last value, otherwise its median in the second half of the run
        power: 1, or -1 for the inverse
    """

    def log(run: Run) -> float:
        return power * _log_scalar(run, tag, last=last)

    a, b = _paired_arms(claim, panel)
    d = paired_difference([log(run) for run in a.runs], [log(run) for run in b.runs], CONFIDENCE)
    shown = d.exponentiated()
    ends = "the only pair, no interval"
    if shown.has_interval:
        bounds = ratio_interval_text(shown.low, shown.high)
        ends = f"{percent(d.confidence)} interval {bounds}, {pairs_words(d)}"
    detail = f"{what} of {a.label} is {times(shown.mean)} times that of {b.label} ({ends})"
    return Estimate(shown, detail, "times", tested=d)


def _log_scalar(run: Run, tag: str, *, last: bool) -> float:
    values = run.curve(tag).values
    value = values[-1]
    if not last:
        value = np.median(values[len(values) // 2 :])
    return math.log(_positive(value, run, tag))


def _below_or_equal(d: PairedDifference, margin: float) -> Outcome:
    return directed_or_equal(d, -margin)


def _not_below(d: PairedDifference, margin: float) -> Outcome:
    return opposite(directed_or_equal(d, -margin))


def _outside(d: PairedDifference, margin: float) -> Outcome:
    return opposite(equivalent(d, margin))


def _itself(claim: ClaimSpec) -> tuple[ClaimSpec, ...]:
    return (claim,)


#: keys of a claim that only some kinds read
OPTIONAL_KEYS = ("margin", "at", "until", "tags")


class ClaimType(NamedTuple):
    """One kind of claim.

    Attributes:
        statement: template of the statement
        measure: function that estimates the quantity of the claim from the runs of a panel
        test: test of the estimate with the margin of the claim, in the unit of the estimate, or of
            their logarithms: below -margin (or equal), not below it, below +margin, inside or
            outside +-margin
        keys: keys of conf/paper that it reads, of `OPTIONAL_KEYS`
        needs_margin: if True, a margin of 0 is refused
        parts: returns the claims of which it consists, each with its own verdict
        per_size: if True, panels of several sizes have a verdict per size
    """

    statement: str
    measure: Callable[[ClaimSpec, LoadedPanel], Estimate]
    test: Callable[[PairedDifference, float], Outcome]
    keys: tuple[str, ...] = ()
    needs_margin: bool = False
    parts: Callable[[ClaimSpec], tuple[ClaimSpec, ...]] = _itself
    per_size: bool = True

    @property
    def compares(self) -> bool:
        """If True, the statement is about two arms."""
        return "{b}" in self.statement


def _lower(claim: ClaimSpec, share: float) -> ClaimSpec:
    """Return the claim that A is below B at a share of the tokens, as a part of a claim."""
    return replace(claim, kind="less", until=share, margin=0.0, text=None, paper_value=None)


def _at_each_quarter(claim: ClaimSpec) -> tuple[ClaimSpec, ...]:
    return tuple(_lower(claim, share) for share in (0.25, 0.5, 0.75, 1.0))


def _change_and_lead(claim: ClaimSpec) -> tuple[ClaimSpec, ...]:
    return claim, _lower(claim, claim.until)


def _lead_and_change(claim: ClaimSpec) -> tuple[ClaimSpec, ...]:
    return _lower(claim, claim.at), claim


#: name in conf/paper -> kind
KINDS: dict[str, ClaimType] = {
    "less": ClaimType("{a} {ends} below {b}{more}", loss, _below_or_equal, ("margin", "until")),
    "not_less": ClaimType("{a} does not end below {b}{more}", loss, _not_below, ("margin",)),
    "equal": ClaimType(
        "{a} ends within {margin:g} of {b}", loss, equivalent, ("margin",), needs_margin=True
    ),
    "leads": ClaimType(
        "{a} is below {b} at each quarter of the tokens",
        loss,
        _below_or_equal,
        parts=_at_each_quarter,
    ),
    "widens": ClaimType(
        "{a} gains on {b} from {at:.0%} to {until:.0%} of the tokens",
        change,
        _below_or_equal,
        ("at", "until"),
        parts=_change_and_lead,
    ),
    "keeps": ClaimType(
        "the lead of {a} over {b} shrinks by less than {margin:g} after {at:.0%} of the tokens",
        change,
        directed,
        ("margin", "at", "until"),
        parts=_lead_and_change,
    ),
    "efficiency": ClaimType(
        "{a} needs fewer tokens than {b} to reach the higher one of both final losses",
        efficiency,
        directed,
    ),
    "apart": ClaimType(
        "in {a} the norms of {tags} grow or shrink at rates more than {margin:.0%} apart",
        growths_apart,
        _outside,
        ("margin", "tags"),
        needs_margin=True,
    ),
    "lower": ClaimType(
        "it ends lower in {a} than in {b}",
        last_ratio,
        directed,
    ),
    "slope": ClaimType(
        "the loss of {a} falls faster with size than that of {b}",
        slope,
        directed,
        per_size=False,
    ),
    "grid_gap": ClaimType(
        "{a} ends below {b}{more}, each at its own optimum", grid_gap, _below_or_equal, ("margin",)
    ),
    "sensitivity": ClaimType(
        "the loss of {a} depends less on the learning rate than that of {b}",
        lr_sensitivity,
        directed,
    ),
    "cost": ClaimType(
        "a step of {a} takes less than {margin:g} times that of {b}",
        partial(ratio, what="time of a step", tag="throughput/tokens_per_s", power=-1),
        directed,
        ("margin",),
        needs_margin=True,
    ),
    "memory": ClaimType(
        "{a} needs less than {margin:g} times the memory of {b}",
        partial(ratio, what="peak memory", tag="memory/peak_gib"),
        directed,
        ("margin",),
        needs_margin=True,
    ),
}
