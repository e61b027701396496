"""What decides each kind of claim: from the runs of a panel to a word, an interval and a sentence.

A - B is a paired difference of validation losses, nats per token, over runs that share seed and data. Of a claim with
several parts (leads early, is overtaken) the figure that is shown is that of the part that decides.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from lightning_sv.analysis.decision import (
    CONTRADICTED,
    HOLDS,
    NOT_RESOLVED,
    Part,
    all_of,
    below,
    difference_sentence,
    inside,
    interval,
    opposite,
)
from lightning_sv.analysis.grids import optimum
from lightning_sv.analysis.paired import PairedDifference, paired_difference, token_efficiency
from lightning_sv.analysis.scaling import FEWEST_SIZES
from lightning_sv.experiments.claims.outcome import Outcome, difference
from lightning_sv.experiments.results import Arm, Panel
from lightning_sv.experiments.spec import ClaimSpec
from lightning_sv.runs.events import Run

#: of the training, for a lead that is kept throughout
QUARTERS = (0.25, 0.5, 0.75, 1.0)


def _two(claim: ClaimSpec, panel: Panel) -> tuple[Arm, Arm, str]:
    a, b = panel.arm(claim.a).paired(panel.arm(claim.b))
    return a, b, f"{claim.a} - {claim.b}"


def less(claim: ClaimSpec, panel: Panel) -> Outcome:
    """A ends below B by more than the margin."""
    a, b, name = _two(claim, panel)
    d = difference(a, b)
    return Outcome(below(d, -claim.margin), d, interval(d, name))


def pair(claim: ClaimSpec, panel: Panel) -> Outcome:
    """A ends below B, in the words of a comparison."""
    a, b, _ = _two(claim, panel)
    d = difference(a, b)
    return Outcome(below(d), d, difference_sentence(b.label, a.label, d))


def not_less(claim: ClaimSpec, panel: Panel) -> Outcome:
    """A does not."""
    found = less(claim, panel)
    return found._replace(word=opposite(found.word))


def crosses(claim: ClaimSpec, panel: Panel) -> Outcome:
    """A is below B early, and not at the end."""
    a, b, name = _two(claim, panel)
    parts = Part(difference(a, b), turned=True), Part(difference(a, b, claim.at))
    word, i, (end, early) = all_of(parts)
    words = f"{interval(early, f'at {claim.at:.0%} of the tokens {name}')}; at the end {interval(end, name)}"
    return Outcome(word, (end, early)[i], words, part=(_at(1.0), _at(claim.at))[i])


def leads(claim: ClaimSpec, panel: Panel) -> Outcome:
    """A is below B at every quarter of the tokens."""
    a, b, name = _two(claim, panel)
    found = {share: difference(a, b, share) for share in QUARTERS}
    means = ", ".join(f"{d.mean:+.3f} at {share:.0%}" for share, d in found.items())
    least_sure_first = sorted(QUARTERS, key=lambda share: _upper(found[share]), reverse=True)
    word, i, shown = all_of([Part(found[share]) for share in least_sure_first])
    at = f"at {least_sure_first[i]:.0%} of the tokens it"
    return Outcome(word, shown[i], f"{name} is {means}; {interval(shown[i], at)}", part=_at(least_sure_first[i]))


def _upper(d: PairedDifference) -> float:
    return d.mean if d.high is None else d.high


def _at(share: float) -> str:
    return "at the end" if share == 1 else f"at {share:.0%}"


class _Change(NamedTuple):
    d: PairedDifference
    words: str


def _change(claim: ClaimSpec, panel: Panel) -> _Change:
    """How a - b moves from one share of the tokens to another."""
    a, b, name = _two(claim, panel)
    early = [difference(_only(a, i), _only(b, i), claim.at).mean for i in range(len(a.runs))]
    late = [difference(_only(a, i), _only(b, i), claim.until).mean for i in range(len(a.runs))]
    d = paired_difference(early, late)
    to = _at(claim.until).removeprefix("at ")
    values = f"{np.mean(early):+.3f} to {np.mean(late):+.3f}"
    return _Change(d, f"the change of {name} from {claim.at:.0%} of the tokens to {to}, {values},")


def widens(claim: ClaimSpec, panel: Panel) -> Outcome:
    """A's lead grows; that is no lead where A is behind after it."""
    (a, b, name), change = _two(claim, panel), _change(claim, panel)
    word, i, (d, lead) = all_of([Part(change.d), Part(difference(a, b, claim.until))])
    detail = f"{interval(d, change.words)}; {interval(lead, f'after it {name}')}"
    return Outcome(word, (d, lead)[i], detail, part=("the change", _at(claim.until))[i])


def keeps(claim: ClaimSpec, panel: Panel) -> Outcome:
    """A's lead shrinks by less than the margin; that is no lead where A is behind before it."""
    (a, b, name), change = _two(claim, panel), _change(claim, panel)
    word, i, (d, lead) = all_of([Part(change.d, claim.margin), Part(difference(a, b, claim.at))])
    detail = f"{interval(d, change.words)}; {interval(lead, f'before it {name}')}"
    return Outcome(word, (d, lead)[i], detail, part=("the change", _at(claim.at))[i])


def _only(arm: Arm, i: int) -> Arm:
    return replace(arm, runs=(arm.runs[i],))


def equal(claim: ClaimSpec, panel: Panel) -> Outcome:
    """A ends within the margin of B."""
    a, b, name = _two(claim, panel)
    d = difference(a, b)
    share = float(np.mean([x.tokens / y.tokens for x, y in zip(a.runs, b.runs, strict=True)]))
    longer = f"with {share:.2f} times the tokens " if abs(share - 1) > 0.01 else ""
    return Outcome(inside(d, claim.margin), d, f"{longer}{interval(d, name)}")


def efficiency(claim: ClaimSpec, panel: Panel) -> Outcome:
    """A passes B's final loss, within its own schedule, after fewer tokens."""
    a, b, _ = _two(claim, panel)
    # B's tokens to B's end over A's tokens to the same loss, on logarithms
    e = token_efficiency(b.curves, a.curves)
    loss = difference(a, b)
    if e.factor is None:
        reached = f"{a.label} reaches {b.label}'s final loss in {e.reached} of {e.n} pairs: no token factor"
        word = CONTRADICTED if below(loss) == CONTRADICTED else NOT_RESOLVED
        return Outcome(word, loss, reached, part="the final loss")
    d = paired_difference(
        [math.log(t) for t in e.tokens_a if t is not None], [math.log(t) for t in e.tokens_b if t is not None]
    )
    within = "one pair, no interval" if e.low is None else f"95% interval {e.low:.2f} to {e.high:.2f}, {e.n} pairs"
    factor = replace(d, mean=e.factor, low=e.low, high=e.high)
    words = f"within one schedule {b.label} needs {e.factor:.2f} times the tokens of {a.label} for its final loss"
    return Outcome(below(d), factor, f"{words} ({within})", "times")


def apart(claim: ClaimSpec, panel: Panel) -> Outcome:
    """Two norms grow by factors whose ratio is further from 1 than exp(margin); contradicted where it is nearer."""
    arm = panel.arm(claim.a)
    one, two = ([math.log(c.values[-1] / c.values[0]) for c in (run.curve(t) for run in arm.runs)] for t in claim.tags)
    d = paired_difference(two, one)
    names = [tag.split("/")[-2] for tag in claim.tags]
    grown = " and ".join(f"{name} by {math.exp(np.mean(x)):.2f}" for name, x in zip(names, (one, two), strict=True))
    detail = f"{arm.label} from its first to its last norm: {grown}; {interval(d, 'the logarithms apart', '')}"
    return Outcome(opposite(inside(d, claim.margin)), d, detail, "in logarithms")


def slope(claim: ClaimSpec, panel: Panel) -> Outcome:
    """The joint fits of the report: both forms must say the same, for that the form is wrong is in neither interval."""
    a, b = (next(each for each in panel.series if each.label == label) for label in (claim.a, claim.b))
    fits = panel.fit(b, a).fits
    n = len(panel.losses(b)[0])
    found = [PairedDifference(f.slope.value, f.slope.low, f.slope.high, None, n, 0.95) for f in fits]
    words = {opposite(below(d)) for d in found}
    if len(b.sizes) < FEWEST_SIZES:
        words.add(NOT_RESOLVED)
    name = {"power": "the exponent of the power law", "log-linear": "the slope in ln N"}
    detail = "; ".join(
        interval(d, f"{name[fit.form]}, {claim.a} - {claim.b},", "") for fit, d in zip(fits, found, strict=True)
    )
    word = words.pop() if len(words) == 1 else NOT_RESOLVED
    detail = f"{detail}; above 0 {claim.a} falls faster, over {len(b.sizes)} sizes"
    return Outcome(word, found[0], detail, "in the exponent")


def grid_gap(claim: ClaimSpec, panel: Panel) -> Outcome:
    """A's best loss of a grid is below B's by more than the optima are uncertain."""
    best, arms = {}, {}
    for series in panel.series:
        of = [panel.arm(name) for name in series.arms]
        found = optimum(series.values, [float(np.mean([r.val_loss for r in x.runs])) for x in of])
        best[series.label], arms[series.label] = found, of[found.at]
    d = difference(arms[claim.a], arms[claim.b])
    # the grid may have missed B's optimum by its error, and A's by A's: the gap must be larger than either
    lower, higher = below(d, -best[claim.b].error), below(d, best[claim.a].error)
    word = lower if lower == HOLDS else higher if higher == CONTRADICTED else NOT_RESOLVED
    at = "; ".join(f"{label} is best at {o.value:g}, {_error(o.error)}" for label, o in best.items())
    return Outcome(word, d, f"{interval(d, f'{claim.a} - {claim.b}')}, each at its best value ({at})")


def _error(error: float) -> str:
    return "the grid's end" if math.isinf(error) else f"where the grid may be {error:.3f} off"


def decided(claim: ClaimSpec, panel: Panel) -> Outcome:
    """A ends below B by the rule that was fixed before the runs."""
    rule, outcome, (a, b, name) = panel.spec.rule, panel.outcome, _two(claim, panel)
    assert rule is not None and outcome is not None
    d, needed, why = difference(a, b), outcome.needed, ""
    if outcome.ends:
        why = f"{' and '.join(outcome.ends)} {'are' if outcome.ends[1:] else 'is'} best at the end of the grid"
    elif needed is None or needed > rule.budget:
        many = "more pairs than can be" if needed is None else f"{needed} pairs"
        why = f"the margin of {rule.margin:g} needs {many}, and the budget is {rule.budget}"
    elif d.smallest_resolvable is None or d.smallest_resolvable > rule.margin:
        why = f"the interval is wider than the margin of {rule.margin:g}, against the pilot's spread"
    if why:
        return Outcome(NOT_RESOLVED, d, f"{interval(d, name)}; {why}")
    return Outcome(below(d, -rule.margin), d, f"{interval(d, name)}, decided at a margin of {rule.margin:g}")


def _ratio(claim: ClaimSpec, panel: Panel, what: str, tag: str, power: int = 1) -> Outcome:
    """A / B of a power of what is logged, its median after the first half of the run."""

    def log(run: Run) -> float:
        values = run.curve(tag).values
        return power * float(np.log(np.median(values[len(values) // 2 :])))

    a, b, _ = _two(claim, panel)
    d = paired_difference([log(r) for r in b.runs], [log(r) for r in a.runs])
    low, high = (None if end is None else math.exp(end) for end in (d.low, d.high))
    ratio = replace(d, mean=math.exp(d.mean), low=low, high=high)
    detail = interval(ratio, f"{what}, {a.label} / {b.label},", "")
    return Outcome(below(d, math.log(claim.margin)), ratio, detail, "times")


def cost(claim: ClaimSpec, panel: Panel) -> Outcome:
    """A step of A takes less than the margin times that of B."""
    return _ratio(claim, panel, "time of a step", "throughput/tokens_per_s", power=-1)


def memory(claim: ClaimSpec, panel: Panel) -> Outcome:
    """A needs less than the margin times the memory of B."""
    return _ratio(claim, panel, "peak memory", "memory/peak_gib")
