"""The kinds of claims that runs can check: a table, one row each.

A - B is a paired difference of validation losses, nats per token, over runs that share seed and data. A claim with
two parts (leads early, is overtaken) holds where both parts hold at 95% each, so its own error is at most theirs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from lightning_sv.paper.events import Run
from lightning_sv.paper.figures import unknown
from lightning_sv.paper.grids import optimum
from lightning_sv.paper.judge import (
    HOLDS,
    NOT_RESOLVED,
    Found,
    all_of,
    below,
    difference,
    inside,
    interval,
    opposite,
)
from lightning_sv.paper.results import ArmResult, PanelKind, PanelResult
from lightning_sv.paper.scaling import FEWEST_SIZES, fit_scaling
from lightning_sv.paper.spec import ClaimSpec, PanelSpec
from lightning_sv.paper.stats import PairedDifference, paired_difference, token_efficiency


@dataclass(frozen=True)
class Kind:
    """One kind of claim.

    Args:
        statement: In words, a template.
        judge: What decides it.
        panels: Kinds of panels that can have it.
        needs: What such a claim, or its panel, must say besides; None where it does.
    """

    statement: str
    judge: Callable[[ClaimSpec, PanelResult], Found]
    panels: tuple[PanelKind, ...] = ("curves", "scaling")
    needs: Callable[[ClaimSpec, PanelSpec], str | None] = lambda claim, panel: None


def _two_tags(claim: ClaimSpec, panel: PanelSpec) -> str | None:
    right = len(claim.tags) == 2 and all(tag.count("/") > 1 for tag in claim.tags)
    return None if right else f"two tags, e.g. branch_norm/mean/q_proj/effective; it has {claim.tags}"


def _rule(claim: ClaimSpec, panel: PanelSpec) -> str | None:
    return None if panel.rule is not None else "the panel's rule; add margin, pilot and budget"


def _margin(claim: ClaimSpec, panel: PanelSpec) -> str | None:
    return None if claim.margin > 0 else "a margin above 0, e.g. 1.05 times"


def _arm(panel: PanelResult, label: str) -> ArmResult:
    for arm in panel.arms:
        if arm.label == label:
            return arm
    raise unknown(f"panel {panel.title!r}: arm", label, [arm.label for arm in panel.arms])


def _two(claim: ClaimSpec, panel: PanelResult) -> tuple[ArmResult, ArmResult, str]:
    return _arm(panel, claim.a), _arm(panel, claim.b), f"{claim.a} - {claim.b}"


def _less(claim: ClaimSpec, panel: PanelResult) -> Found:
    a, b, name = _two(claim, panel)
    d = difference(a, b)
    return Found(below(d, -claim.margin), d, interval(d, name))


def _not_less(claim: ClaimSpec, panel: PanelResult) -> Found:
    a, b, name = _two(claim, panel)
    d = difference(a, b)
    return Found(opposite(below(d, -claim.margin)), d, interval(d, name))


def _crosses(claim: ClaimSpec, panel: PanelResult) -> Found:
    a, b, name = _two(claim, panel)
    early, end = difference(a, b, claim.at), difference(a, b)
    word = all_of([below(early), opposite(below(end))])
    return Found(word, end, f"{interval(early, f'at {claim.at:.0%} of the tokens {name}')}; at the end "
                            f"{interval(end, name)}")  # fmt: skip


def _change(claim: ClaimSpec, panel: PanelResult, until: float) -> tuple[PairedDifference, PairedDifference, str]:
    """How a - b moves from one share of the tokens to another; a - b at the later one; the sentence."""
    a, b, name = _two(claim, panel)
    early = [difference(_only(a, i), _only(b, i), claim.at).mean for i in range(len(a.runs))]
    late = [difference(_only(a, i), _only(b, i), until).mean for i in range(len(a.runs))]
    d = paired_difference(early, late)
    to = "the end" if until == 1 else f"{until:.0%}"
    values = f"{np.mean(early):+.3f} to {np.mean(late):+.3f}"
    words = interval(d, f"the change of {name} from {claim.at:.0%} of the tokens to {to}, {values},")
    return d, difference(a, b, until), words


def _widens(claim: ClaimSpec, panel: PanelResult) -> Found:
    d, late, words = _change(claim, panel, claim.until)
    return Found(all_of([below(d), below(late)]), d, words)  # a lead that grows is no lead where A is behind


def _keeps(claim: ClaimSpec, panel: PanelResult) -> Found:
    d, _, words = _change(claim, panel, claim.until)
    return Found(below(d, claim.margin), d, words)


def _only(arm: ArmResult, i: int) -> ArmResult:
    return replace(arm, runs=(arm.runs[i],))


def _equal(claim: ClaimSpec, panel: PanelResult) -> Found:
    a, b, name = _two(claim, panel)
    d = difference(a, b)
    share = float(np.mean([x.tokens / y.tokens for x, y in zip(a.runs, b.runs, strict=True)]))
    longer = f"with {share:.2f} times the tokens " if abs(share - 1) > 0.01 else ""
    return Found(inside(d, claim.margin), d, f"{longer}{interval(d, name)}")


def _efficiency(claim: ClaimSpec, panel: PanelResult) -> Found:
    a, b, _ = _two(claim, panel)
    # B's tokens to B's end over A's tokens to the same loss, on logarithms
    e = token_efficiency([r.curve("val/loss") for r in b.runs], [r.curve("val/loss") for r in a.runs])
    loss = difference(a, b)
    if e.factor is None:
        reached = f"{a.label} reaches {b.label}'s final loss in {e.reached} of {e.n} pairs: no token factor"
        return Found(NOT_RESOLVED if below(loss) != "contradicted" else "contradicted", loss, reached)
    d = paired_difference(
        [math.log(t) for t in e.tokens_a if t is not None], [math.log(t) for t in e.tokens_b if t is not None]
    )
    within = "one pair, no interval" if e.low is None else f"95% interval {e.low:.2f} to {e.high:.2f}, {e.n} pairs"
    factor = replace(d, mean=e.factor, low=e.low, high=e.high)
    return Found(below(d), factor, f"{b.label} needs {e.factor:.2f} times the tokens of {a.label} ({within})")


def _apart(claim: ClaimSpec, panel: PanelResult) -> Found:
    arm = _arm(panel, claim.a)
    one, two = ([math.log(c.values[-1] / c.values[0]) for c in (run.curve(t) for run in arm.runs)] for t in claim.tags)
    d = paired_difference(two, one)
    names = [tag.split("/")[-2] for tag in claim.tags]
    grown = " and ".join(f"{name} by {math.exp(np.mean(x)):.2f}" for name, x in zip(names, (one, two), strict=True))
    detail = f"{arm.label} from its first to its last norm: {grown}; {interval(d, 'the logarithms apart', '')}"
    return Found(HOLDS if d.resolved else NOT_RESOLVED, d, detail)


def _slope(claim: ClaimSpec, panel: PanelResult) -> Found:
    """The joint fits of the report: both forms must say the same, for that the form is wrong is in neither interval."""
    a, b = (next(each for each in panel.extra["series"] if each["label"] == label) for label in (claim.a, claim.b))
    losses = [np.array([[run.val_loss for run in _arm(panel, x).runs] for x in each["arms"]]) for each in (b, a)]
    fits = fit_scaling(b["parameters"], *losses).fits
    n = losses[0].shape[1]
    found = [PairedDifference(f.slope.value, f.slope.low, f.slope.high, None, n, 0.95) for f in fits]
    words = {opposite(below(d)) for d in found}
    if len(b["sizes"]) < FEWEST_SIZES:
        words.add(NOT_RESOLVED)
    name = {"power": "the exponent of the power law", "log-linear": "the slope in ln N"}
    detail = "; ".join(
        interval(d, f"{name[fit.form]}, {claim.a} - {claim.b},", "") for fit, d in zip(fits, found, strict=True)
    )
    word = words.pop() if len(words) == 1 else NOT_RESOLVED
    return Found(word, found[0], f"{detail}; above 0 {claim.a} falls faster, over {len(b['sizes'])} sizes")


def _grid_gap(claim: ClaimSpec, panel: PanelResult) -> Found:
    best, arms = {}, {}
    for series in panel.extra["series"]:
        of = [_arm(panel, name) for name in series["arms"]]
        best[series["label"]] = optimum(series["values"], [float(np.mean([r.val_loss for r in x.runs])) for x in of])
        arms[series["label"]] = of[best[series["label"]].at]
    d = difference(arms[claim.a], arms[claim.b])
    # the grid may have missed B's optimum by its error, and A's by A's: the gap must be larger than either
    words = below(d, -best[claim.b].error), opposite(below(d, best[claim.a].error))
    word = words[0] if words[0] == "holds" else opposite(words[1]) if words[1] == "holds" else NOT_RESOLVED
    at = "; ".join(f"{label} is best at {o.value:g}, {_error(o.error)}" for label, o in best.items())
    return Found(word, d, f"{interval(d, f'{claim.a} - {claim.b}')}, each at its best value ({at})")


def _error(error: float) -> str:
    return "the grid's end" if math.isinf(error) else f"where the grid may be {error:.3f} off"


def _decided(claim: ClaimSpec, panel: PanelResult) -> Found:
    rule, (a, b, name) = panel.extra["rule"], _two(claim, panel)
    d = difference(a, b)
    needed, why = rule["needed"], ""
    if rule["ends"]:
        why = f"{' and '.join(rule['ends'])} {'are' if rule['ends'][1:] else 'is'} best at the end of the grid"
    elif needed is None or needed > rule["budget"]:
        many = "more pairs than can be" if needed is None else f"{needed} pairs"
        why = f"the margin of {rule['margin']:g} needs {many}, and the budget is {rule['budget']}"
    elif d.smallest_resolvable is None or d.smallest_resolvable > rule["margin"]:
        why = f"the interval is wider than the margin of {rule['margin']:g}, against the pilot's spread"
    if why:
        return Found(NOT_RESOLVED, d, f"{interval(d, name)}; {why}")
    return Found(below(d, -rule["margin"]), d, f"{interval(d, name)}, decided at a margin of {rule['margin']:g}")


def _ratio(claim: ClaimSpec, panel: PanelResult, what: str, tag: str, power: int = 1) -> Found:
    """A / B of a power of what is logged, its median after the first half of the run."""

    def log(run: Run) -> float:
        values = run.curve(tag).values
        return power * float(np.log(np.median(values[len(values) // 2 :])))

    a, b, _ = _two(claim, panel)
    d = paired_difference([log(r) for r in b.runs], [log(r) for r in a.runs])
    ratio = replace(d, mean=math.exp(d.mean), low=None if d.low is None else math.exp(d.low),
                    high=None if d.high is None else math.exp(d.high))  # fmt: skip
    return Found(below(d, math.log(claim.margin)), ratio, interval(ratio, f"{what}, {a.label} / {b.label},", ""))


def _cost(claim: ClaimSpec, panel: PanelResult) -> Found:
    return _ratio(claim, panel, "time of a step", "throughput/tokens_per_s", power=-1)


def _memory(claim: ClaimSpec, panel: PanelResult) -> Found:
    return _ratio(claim, panel, "peak memory", "memory/peak_gib")


#: kinds that one interval in nats per token decides: more pairs would help
SINGLE = ("less", "not_less", "equal", "keeps")

KINDS: dict[str, Kind] = {
    "less": Kind("{a} ends below {b}{more}", _less),
    "not_less": Kind("{a} does not end below {b}{more}", _not_less),
    "equal": Kind("{a} ends within {margin:g} of {b}", _equal),
    "crosses": Kind("{a} leads {b} at {at:.0%} of the tokens and is overtaken", _crosses),
    "widens": Kind("the lead of {a} over {b} is larger at {until:.0%} of the tokens than at {at:.0%}", _widens),
    "keeps": Kind("the lead of {a} over {b} shrinks by less than {margin:g} after {at:.0%} of the tokens", _keeps),
    "efficiency": Kind("{a} reaches the final loss of {b} with fewer tokens", _efficiency),
    "apart": Kind("in {a} the norms of {tags} grow or shrink at different rates", _apart, ("qkv",), _two_tags),
    "slope": Kind("the loss of {a} falls faster with size than that of {b}", _slope, ("scaling",)),
    "grid_gap": Kind("{a} ends below {b}, each at its best value, by more than the grid's error", _grid_gap, ("grid",)),
    "decided": Kind(
        "{a} ends below {b} by more than the margin, each at its own best value", _decided, ("grid",), _rule
    ),
    "cost": Kind("a step of {a} takes less than {margin:g} times that of {b}", _cost, ("table",), _margin),
    "memory": Kind("{a} needs less than {margin:g} times the memory of {b}", _memory, ("table",), _margin),
}
