"""What decides each kind of claim: from the runs of a panel to a word, an interval and a sentence.

A - B is a difference of validation losses, nats per token, over runs that share seed and data; its scatter is that of
all arms of the family (`together`). What a claim says besides is a claim of its own, see `table.KINDS`.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from lightning_sv.analysis.decision import (
    CONFIDENCE,
    CONTRADICTED,
    HOLDS,
    MARGIN,
    NOT_RESOLVED,
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
from lightning_sv.analysis.grids import Optimum
from lightning_sv.analysis.paired import PairedDifference, paired_difference, percent, token_efficiency
from lightning_sv.analysis.scaling import FEWEST_SIZES, Interval
from lightning_sv.errors import NotTestableError
from lightning_sv.experiments.claims.outcome import Outcome
from lightning_sv.experiments.claims.together import TWO_SIDED, Change, LossAt, difference
from lightning_sv.experiments.results import Arm, Panel
from lightning_sv.experiments.spec import ClaimSpec
from lightning_sv.runs.events import Run


def _two(claim: ClaimSpec, panel: Panel) -> tuple[Arm, Arm, str]:
    a, b = panel.arm(claim.a).paired(panel.arm(claim.b))
    return a, b, f"{claim.a} - {claim.b}"


def less(claim: ClaimSpec, panel: Panel) -> Outcome:
    """A is below B by more than the margin, at the end or at a share of the tokens."""
    a, b, name = _two(claim, panel)
    d = difference(panel, a, b, LossAt(claim.until))
    finding = directed_or_equal(d, -claim.margin)
    at = "" if claim.until == 1 else f"at {claim.until:.0%} of the tokens "
    small = finding.word == HOLDS and claim.margin < MARGIN and inside(d, MARGIN) == HOLDS
    return Outcome(finding, d, f"{at}{interval(d, name)}{f', which is within {MARGIN:g}' * small}")


def not_less(claim: ClaimSpec, panel: Panel) -> Outcome:
    """A does not."""
    found = less(claim, panel)
    return found._replace(finding=opposite(found.finding))


def _change(claim: ClaimSpec, panel: Panel) -> tuple[PairedDifference, str]:
    """How a - b moves from one share of the tokens to another, and the sentence about it."""
    a, b, name = _two(claim, panel)
    d = difference(panel, a, b, Change(claim.at, claim.until))
    early, late = (difference(panel, a, b, LossAt(share)).mean for share in (claim.at, claim.until))
    to = "the end" if claim.until == 1 else f"{claim.until:.0%}"
    words = f"the change of {name} from {claim.at:.0%} of the tokens to {to}, {early:+.3f} to {late:+.3f},"
    return d, interval(d, words)


def widens(claim: ClaimSpec, panel: Panel) -> Outcome:
    """A - B falls from one share of the tokens to another."""
    d, words = _change(claim, panel)
    return Outcome(directed_or_equal(d), d, words)


def keeps(claim: ClaimSpec, panel: Panel) -> Outcome:
    """A - B rises by less than the margin."""
    d, words = _change(claim, panel)
    return Outcome(directed(d, claim.margin), d, words)


def equal(claim: ClaimSpec, panel: Panel) -> Outcome:
    """A ends within the margin of B."""
    a, b, name = _two(claim, panel)
    d = difference(panel, a, b)
    share = float(np.mean([x.tokens / y.tokens for x, y in zip(a.runs, b.runs, strict=True)]))
    longer = f"with {share:.2f} times the tokens " if abs(share - 1) > 0.01 else ""
    return Outcome(equivalent(d, claim.margin), d, f"{longer}{interval(d, name)}")


def efficiency(claim: ClaimSpec, panel: Panel) -> Outcome:
    """A passes B's final loss, within its own schedule, after fewer tokens."""
    a, b, _ = _two(claim, panel)
    # B's tokens to B's end over A's tokens to the same loss, on logarithms
    e = token_efficiency(b.curves, a.curves, CONFIDENCE)
    if e.why_not:
        raise NotTestableError(e.why_not)
    if e.factor is None:
        loss = difference(panel, a, b)
        reached = f"{a.label} reaches {b.label}'s final loss in {e.reached} of {e.n} pairs: no token factor"
        word = CONTRADICTED if below(loss) == CONTRADICTED else NOT_RESOLVED
        found = directed(loss)._replace(word=word, p=loss.p_above())
        if loss.mean <= 0:
            found = found._replace(to_go="")  # more pairs would not make one of these reach it
        return Outcome(found, loss, reached, part="the final loss")
    tokens_a, tokens_b = ([math.log(t) for t in of if t is not None] for of in (e.tokens_a, e.tokens_b))
    d = paired_difference(tokens_a, tokens_b, CONFIDENCE)
    level = percent(CONFIDENCE)
    within = f"{level} interval {e.low:.2f} to {e.high:.2f}, {e.n} pairs" if e.low else "one pair, no interval"
    factor = replace(d, mean=e.factor, low=e.low, high=e.high)
    words = f"within one schedule {b.label} needs {e.factor:.2f} times the tokens of {a.label} for its final loss"
    return Outcome(directed(d), factor, f"{words} ({within})", "times")


def apart(claim: ClaimSpec, panel: Panel) -> Outcome:
    """Two norms grow by factors whose ratio is further from 1 than exp(margin); contradicted where it is nearer."""
    arm = panel.arm(claim.a)
    one, two = ([math.log(c.values[-1] / c.values[0]) for c in (run.curve(t) for run in arm.runs)] for t in claim.tags)
    d = paired_difference(two, one, CONFIDENCE)
    names = [tag.split("/")[-2] for tag in claim.tags]
    grown = " and ".join(f"{name} by {math.exp(np.mean(x)):.2f}" for name, x in zip(names, (one, two), strict=True))
    detail = f"{arm.label} from its first to its last norm: {grown}; {interval(d, 'the logarithms apart', '')}"
    return Outcome(opposite(equivalent(d, claim.margin)), d, detail, "in logarithms")


def slope(claim: ClaimSpec, panel: Panel) -> Outcome:
    """The joint fits of the report: both forms must say the same, for that the form is wrong is in neither interval."""
    a, b = (next(each for each in panel.series if each.label == label) for label in (claim.a, claim.b))
    fits, n, sizes = panel.fit(b, a).fits, len(panel.losses(b)[0]), len(b.sizes)
    found = [_of_fit(fit.slope, n, sizes * (n - 1)) for fit in fits]
    findings = [opposite(directed(d)) for d in found]
    words = {finding.word for finding in findings}
    word = next(iter(words)) if len(words) == 1 and sizes >= FEWEST_SIZES else NOT_RESOLVED
    name = {"power": "the exponent of the power law", "log-linear": "the slope in ln N"}
    detail = "; ".join(
        interval(d, f"{name[fit.form]}, {claim.a} - {claim.b},", "") for fit, d in zip(fits, found, strict=True)
    )
    detail = f"{detail}; above 0 {claim.a} falls faster, over {sizes} sizes"
    least = max(findings, key=lambda finding: finding.p)._replace(word=word)
    if sizes < FEWEST_SIZES or {HOLDS, CONTRADICTED} <= words:
        least = least._replace(to_go="")  # sizes are lacking, or a law that fits, not pairs
    return Outcome(least, found[0], detail, "in the exponent", sides=2)


def _of_fit(slope: Interval, n: int, df: int) -> PairedDifference:
    """A slope with the standard error that its interval, drawn by a bootstrap, comes to."""
    half = None if slope.low is None or slope.high is None else (slope.high - slope.low) / 2
    se = None if half is None else half / float(stdtrit(df, 0.5 + TWO_SIDED / 2))
    return PairedDifference(slope.value, slope.low, slope.high, se, n, TWO_SIDED, df)


def grid_gap(claim: ClaimSpec, panel: Panel) -> Outcome:
    """A's optimum is below B's by more than the margin; the seeds are the same, so that their offsets cancel."""
    of = {series.label: panel.optimum(series) for series in panel.series}
    a, b = of[claim.a], of[claim.b]
    d = _of_optima(a, b, len(panel.losses(panel.series[0])[0]))
    where = "; ".join(optimum_words(label, of[label], panel.spec.axes) for label in (claim.a, claim.b))
    finding = directed_or_equal(d, -claim.margin)
    if a.why_not or b.why_not:
        finding = finding._replace(word=NOT_RESOLVED, to_go="")  # the sentence says what the grid lacks
    return Outcome(finding, d, f"{interval(d, f'{claim.a} - {claim.b}')}, each at its optimum: {where}")


def _of_optima(a: Optimum, b: Optimum, n: int) -> PairedDifference:
    """A - B of two fits to runs on the same n seeds, with Welch's degrees of freedom."""
    d = a.loss - b.loss
    if not a.se or not b.se:
        return PairedDifference(d, None, None, None, n, CONFIDENCE, 0)
    se = math.hypot(a.se, b.se)
    df = int(se**4 / (a.se**4 / a.df + b.se**4 / b.df))
    return PairedDifference(d, None, None, se, n, CONFIDENCE, df).at(CONFIDENCE)


def optimum_words(label: str, o: Optimum, axes: Iterable[str]) -> str:
    """`llama at lr 0.011 (times or over 1.05), init_std 0.018 (1.09)`; where no fit gave it, why."""
    at = ", ".join(
        f"{key.rpartition('.')[2]} {value:.3g}" + (f" (times or over {math.exp(error):.2f})" if error > 0 else "")
        for key, value, error in zip(axes, o.values, o.errors, strict=True)
    )
    return f"{label} at {at}" + (f", its lowest point: {o.why_not}" if o.why_not else "")


def _settled(values: NDArray[np.float64]) -> float:
    return float(np.median(values[len(values) // 2 :]))


def _last(values: NDArray[np.float64]) -> float:
    return float(values[-1])


def _ratio(
    claim: ClaimSpec,
    panel: Panel,
    what: str,
    tag: str,
    *,
    of: Callable[[NDArray[np.float64]], float] = _settled,
    power: int = 1,
    below: float,
) -> Outcome:
    """That A / B of a power of what is logged is below a number; by default of its median after half of the run."""

    def log(run: Run) -> float:
        value = of(run.curve(tag).values)
        if not value > 0:
            raise NotTestableError(f"{tag} of {run.dir} is {value:g}, and ratios want numbers above 0.")
        return power * math.log(value)

    a, b, _ = _two(claim, panel)
    d = paired_difference([log(r) for r in b.runs], [log(r) for r in a.runs], CONFIDENCE)
    low, high = (None if end is None else math.exp(end) for end in (d.low, d.high))
    ratio = replace(d, mean=math.exp(d.mean), low=low, high=high)
    ends = "the only pair, no interval"
    if low is not None and high is not None:
        ends = f"{percent(d.confidence)} interval {times(low)} to {times(high)}, {pairs_words(d)}"
    detail = f"{what} of {a.label} is {times(ratio.mean)} times that of {b.label} ({ends})"
    return Outcome(directed(d, math.log(below)), ratio, detail, "times")


def cost(claim: ClaimSpec, panel: Panel) -> Outcome:
    """A step of A takes less than the margin times that of B."""
    return _ratio(claim, panel, "time of a step", "throughput/tokens_per_s", power=-1, below=claim.margin)


def memory(claim: ClaimSpec, panel: Panel) -> Outcome:
    """A needs less than the margin times the memory of B."""
    return _ratio(claim, panel, "peak memory", "memory/peak_gib", below=claim.margin)


def lower(claim: ClaimSpec, panel: Panel) -> Outcome:
    """What the panel draws, which its title names, ends lower in A than in B."""
    return _ratio(claim, panel, panel.spec.tag, panel.spec.tag, of=_last, below=1.0)
