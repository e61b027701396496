"""What an interval says about a bound: one of five words with its p value, and in a sentence.

A claim that names a direction is tested by one side at 5%, the claim and its opposite each, and "equal" by both sides
at 5% (Schuirmann 1987). One interval shows all three: that of 90%, whose ends are the bounds of the one-sided tests.
"""

import math
from typing import Literal, NamedTuple

from scipy.optimize import brentq
from scipy.special import ndtr, ndtri

from lightning_sv.analysis.paired import PairedDifference, TokenEfficiency, percent

VerdictWord = Literal["holds", "contradicted", "equal within 0.01", "not resolved", "not testable here"]

HOLDS: VerdictWord = "holds"
CONTRADICTED: VerdictWord = "contradicted"
EQUAL: VerdictWord = "equal within 0.01"
NOT_RESOLVED: VerdictWord = "not resolved"
NOT_TESTABLE: VerdictWord = "not testable here"

#: error of a one-sided test
ALPHA = 0.05
#: of the interval that shows its bounds
CONFIDENCE = 1 - 2 * ALPHA
#: nats per token: a difference that is surely smaller is none
MARGIN = 0.01


class Finding(NamedTuple):
    """What a test came to.

    Attributes:
        p: of the one-sided test behind it; where nothing is resolved that of the nearest
        to_go: pairs that would decide it, in words; empty where no scatter is known to tell from
    """

    word: VerdictWord
    p: float
    to_go: str = ""


def below(d: PairedDifference, bound: float = 0.0) -> VerdictWord:
    """Whether the interval lies below a bound, above it, or covers it. One pair has no interval: not resolved."""
    if d.low is None or d.high is None:
        return NOT_RESOLVED
    return HOLDS if d.high < bound else CONTRADICTED if d.low > bound else NOT_RESOLVED


def inside(d: PairedDifference, margin: float) -> VerdictWord:
    """Whether the interval lies within +-margin, outside it, or crosses an end."""
    if d.low is None or d.high is None:
        return NOT_RESOLVED
    if d.low > -margin and d.high < margin:
        return HOLDS
    return CONTRADICTED if d.low > margin or d.high < -margin else NOT_RESOLVED


def directed(d: PairedDifference, bound: float = 0.0) -> Finding:
    """Test a claim that d is below a bound, and its opposite."""
    return Finding(below(d, bound), min(d.p_below(bound), d.p_above(bound)), pairs_to_go(d, bound))


def directed_or_equal(d: PairedDifference, bound: float = 0.0) -> Finding:
    """The same of a difference of losses: one that has no direction may be shown to be none."""
    if below(d, bound) == NOT_RESOLVED and inside(d, MARGIN) == HOLDS:
        return Finding(EQUAL, d.p_within(MARGIN))
    none = bound > -MARGIN  # else what is not below the bound is not inside the margin
    return directed(d, bound)._replace(to_go=pairs_to_go(d, bound, none=none))


def direction(d: PairedDifference) -> str:
    """Return the result for B of a difference B - A: lower, higher, equal within 0.01 or not resolved."""
    word = directed_or_equal(d).word
    return {HOLDS: "lower", CONTRADICTED: "higher"}.get(word, word)


def equivalent(d: PairedDifference, margin: float) -> Finding:
    """Test a claim that d is within +-margin, and that it is not."""
    outside = min(d.p_below(-margin), d.p_above(margin))
    return Finding(inside(d, margin), min(d.p_within(margin), outside), pairs_to_equal(d, margin))


def opposite(finding: Finding) -> Finding:
    """What the same test says of the negated claim."""
    return finding._replace(word={HOLDS: CONTRADICTED, CONTRADICTED: HOLDS}.get(finding.word, finding.word))


def interval(d: PairedDifference, what: str, unit: str = "nats per token") -> str:
    """`unified - llama is -0.086 nats per token (95% interval -0.132 to -0.041, 3 pairs)`."""
    unit = f" {unit}" if unit else ""
    if d.low is None or d.high is None:
        found = "in the only pair, which gives no interval" if d.n == 1 else f"over {d.n} pairs, without an interval"
        return f"{what} is {d.mean:+.3f}{unit} {found}"
    n = digits((d.high - d.low) / 2)
    within = f"{percent(d.confidence)} interval {d.low:+.{n}f} to {d.high:+.{n}f}, {pairs_words(d)}"
    return f"{what} is {d.mean:+.{n}f}{unit} ({within})"


def pairs_words(d: PairedDifference) -> str:
    """`6 pairs; scatter of 15 arms, 70 degrees of freedom`."""
    return f"{d.n} {'pair' if d.n == 1 else 'pairs'}{f'; {d.scatter}' * bool(d.scatter)}"


#: how often the pairs that are named would decide
_POWER = 0.8
#: pairs that nobody trains
_TOO_MANY = 10_000


def pairs_to_go(d: PairedDifference, bound: float = 0.0, *, none: bool = False) -> str:
    """`about 14 pairs would decide a difference as large, 34 show that there is none`; each in 8 of 10 cases.

    Args:
        d: the scatter of its pairs is taken as known
        bound: that d is tested against
        none: whether pairs may also show that d is none, smaller than `MARGIN`
    """
    if not d.se:
        return ""
    spread = d.se * math.sqrt(max(d.n, 1))
    needed = _pairs_beyond(spread, d.confidence, d.mean - bound)
    if not none:
        return _decide(d.n, needed)
    no_effect = _number(d.n, pairs_within(spread, d.confidence, MARGIN))
    if needed > _TOO_MANY:
        return f"{no_effect} pairs would show that there is none"
    return f"{_decide(d.n, needed)}, {no_effect.removeprefix('about ')} show that there is none"


def pairs_to_equal(d: PairedDifference, margin: float) -> str:
    """`about 88 pairs would decide a difference as large`: whether it lies within +-margin, in 8 of 10 cases."""
    if not d.se:
        return ""
    spread, away = d.se * math.sqrt(max(d.n, 1)), abs(d.mean) - margin
    if away < 0:
        return _decide(d.n, pairs_within(spread, d.confidence, margin, abs(d.mean)))
    return _decide(d.n, _pairs_beyond(spread, d.confidence, away))


def pairs_within(spread: float, confidence: float, margin: float, mean: float = 0.0) -> float:
    """Pairs after which two one-sided tests show a difference to be within +-margin, in 8 of 10 cases.

    Args:
        spread: standard deviation of a pair
        confidence: coverage of the interval, whose ends are the bounds of the tests
        margin: above `mean`
        mean: the difference that there is, at least 0
    """
    z = float(ndtri((1 + confidence) / 2))

    def lacks(root: float) -> float:
        near, far = ((margin - sign * mean) * root / spread - z for sign in (1, -1))
        return float(ndtr(near) + ndtr(far)) - 1 - _POWER

    return float(brentq(lacks, 0.0, (z + 3) * spread / (margin - mean))) ** 2


def _pairs_beyond(spread: float, confidence: float, distance: float) -> float:
    """Pairs after which a one-sided test tells a difference from a bound at that distance."""
    root = float(ndtri((1 + confidence) / 2) + ndtri(_POWER)) * spread
    return (root / distance) ** 2 if abs(distance) * _TOO_MANY > root else math.inf


def _decide(n: int, needed: float) -> str:
    return f"{_number(n, needed)} pairs would decide a difference as large"


def _number(n: int, needed: float) -> str:
    """`about 14`; few pairs scatter less than their t has it, so that those at hand are never enough."""
    return f"more than {_TOO_MANY:,}" if needed > _TOO_MANY else f"about {max(n + 1, math.ceil(needed)):,}"


def times(ratio: float) -> str:
    """A ratio with two decimals, or two figures where it is small."""
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"


def digits(scale: float) -> int:
    """Decimals that show two figures of ``scale``, at least three."""
    return 3 if scale <= 0 else min(6, max(3, 1 - math.floor(math.log10(scale))))


def difference_sentence(a: str, b: str, d: PairedDifference) -> str:
    """`unified is lower than llama by 0.086 nats per token (95% interval 0.041 to 0.132, 3 pairs)`."""
    if d.low is None or d.high is None or d.smallest_resolvable is None:
        return (
            f"Not resolved: one pair gives no interval; {b} - {a} is {d.mean:+.3f} nats per token for this seed alone. "
            "Add seeds."
        )
    n = digits(d.smallest_resolvable)
    level = f"{percent(d.confidence)} interval"
    if below(d) == NOT_RESOLVED:
        ends = f"the {level} of {b} - {a}, {d.low:+.{n}f} to {d.high:+.{n}f} nats per token"
        if inside(d, MARGIN) == HOLDS:
            return f"{b} and {a} are equal within {MARGIN:g}: {ends}, lies inside ({pairs_words(d)})."
        scatter = f" ({d.scatter})" if d.scatter else ""
        return (
            f"Not resolved: {ends}, covers zero; {d.n} pairs could show a difference of about "
            f"{d.smallest_resolvable:.{n}f}{scatter}."
        )
    low, high = sorted((abs(d.low), abs(d.high)))
    return (
        f"{b} is {'lower' if d.mean < 0 else 'higher'} than {a} by {abs(d.mean):.{n}f} nats per token ({level} "
        f"{low:.{n}f} to {high:.{n}f}, {pairs_words(d)})."
    )


def tokens_sentence(a: str, b: str, e: TokenEfficiency, confidence: float = 0.95) -> str:
    """`To the higher of the final losses, llama needs 1.24 times the tokens of unified (95% interval 1.17 to 1.31)`."""
    if e.factor is None:
        return f"{b} against {a}: no token factor, because {e.why_not or 'a run ends no lower than it began'}."
    within = "one pair, no interval"
    if e.low is not None and e.high is not None:
        within = f"{percent(confidence)} interval {times(e.low)} to {times(e.high)}, {e.n} pairs"
    return f"To the higher of the final losses, {a} needs {times(e.factor)} times the tokens of {b} ({within})."
