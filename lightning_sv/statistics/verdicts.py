"""Verdicts from confidence intervals, with p values and sentences.

A claim with a direction and its opposite are each tested by one side at 5%, and "equal" by two
one-sided tests at 5% (Schuirmann 1987). The 90% interval shows all three, because its ends are the
bounds of the one-sided tests.
"""

import math
from typing import Literal, NamedTuple

from lightning_sv.statistics.paired import PairedDifference, TokenEfficiency, percent

VerdictWord = Literal[
    "holds", "contradicted", "equal within 0.01", "not resolved", "not testable here"
]

HOLDS: VerdictWord = "holds"
CONTRADICTED: VerdictWord = "contradicted"
EQUAL: VerdictWord = "equal within 0.01"
NOT_RESOLVED: VerdictWord = "not resolved"
NOT_TESTABLE: VerdictWord = "not testable here"

#: error of a one-sided test
ALPHA = 0.05
#: coverage of the interval whose ends are the bounds of both one-sided tests
CONFIDENCE = 1 - 2 * ALPHA
#: nats per token; smaller differences count as equal
MARGIN = 0.01


class Outcome(NamedTuple):
    """Result of a test.

    Attributes:
        p: p value of the one-sided test; if nothing is resolved, the smaller one of both sides
    """

    word: VerdictWord
    p: float


def verdict_below(d: PairedDifference, bound: float = 0.0) -> VerdictWord:
    """Return the verdict on "d is below the bound", by its interval."""
    if d.high < bound:
        return HOLDS
    if d.low > bound:
        return CONTRADICTED
    return NOT_RESOLVED


def verdict_inside(d: PairedDifference, margin: float) -> VerdictWord:
    """Return the verdict on "d is within +-margin", by its interval."""
    if max(abs(d.low), abs(d.high)) < margin:
        return HOLDS
    if d.low > margin or d.high < -margin:
        return CONTRADICTED
    return NOT_RESOLVED


def directed(d: PairedDifference, bound: float = 0.0) -> Outcome:
    """Test the claim that d is below a bound, and its opposite."""
    p = min(d.p_below(bound), d.p_above(bound))
    return Outcome(verdict_below(d, bound), p)


def directed_or_equal(d: PairedDifference, bound: float = 0.0) -> Outcome:
    """Test as `directed`; a difference of losses without a direction may be equal."""
    has_direction = verdict_below(d, bound) != NOT_RESOLVED
    is_equal = verdict_inside(d, MARGIN) == HOLDS
    if is_equal and not has_direction:
        return Outcome(EQUAL, d.p_within(MARGIN))
    return directed(d, bound)


def direction(d: PairedDifference) -> str:
    """Return what A - B shows of A: lower, higher, equal within 0.01 or not resolved."""
    word = directed_or_equal(d).word
    return {HOLDS: "lower", CONTRADICTED: "higher"}.get(word, word)


def equivalent(d: PairedDifference, margin: float) -> Outcome:
    """Test the claim that d is within +-margin, and its opposite."""
    outside = min(d.p_below(-margin), d.p_above(margin))
    return Outcome(verdict_inside(d, margin), min(d.p_within(margin), outside))


def opposite(outcome: Outcome) -> Outcome:
    """Return the result of the same test for the negated claim."""
    swapped = {HOLDS: CONTRADICTED, CONTRADICTED: HOLDS}
    return outcome._replace(word=swapped.get(outcome.word, outcome.word))


def interval(d: PairedDifference, what: str, unit: str = "nats per token") -> str:
    """`unified - llama is -0.086 nats per token (95% interval -0.132 to -0.041, 3 pairs)`."""
    unit = f" {unit}" if unit else ""
    if not d.has_interval:
        where = f"over {d.n} pairs, without an interval"
        if d.n == 1:
            where = "in the only pair, which gives no interval"
        return f"{what} is {d.mean:+.3f}{unit} {where}"

    n = decimals(d.smallest_resolvable)
    ends = f"{percent(d.confidence)} interval {d.low:+.{n}f} to {d.high:+.{n}f}"
    return f"{what} is {d.mean:+.{n}f}{unit} ({ends}, {pairs_words(d)})"


def pairs_words(d: PairedDifference) -> str:
    """`6 pairs; scatter of 15 arms, 70 degrees of freedom`, and of few pairs their own interval."""
    words = [count_pairs(d.n)]
    if d.scatter:
        words.append(d.scatter)
    alone = d.alone
    if alone is not None:
        n = decimals(alone.smallest_resolvable)
        words.append(f"by their own scatter {alone.low:+.{n}f} to {alone.high:+.{n}f}")
    return "; ".join(words)


def interval_text(low: float, high: float) -> str:
    """`-0.0952 to -0.0422`; `no interval` if its ends are NaN."""
    if math.isnan(low):
        return "no interval"
    return f"{low:+.4f} to {high:+.4f}"


def count_pairs(n: int) -> str:
    """`1 pair` or `6 pairs`."""
    return "1 pair" if n == 1 else f"{n} pairs"


def times(ratio: float) -> str:
    """Return a ratio with two decimals, or with two significant digits if it is small."""
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"


def ratio_interval_text(low: float, high: float) -> str:
    """`1.02 to 1.30`; `no interval` if its ends are NaN."""
    if math.isnan(low):
        return "no interval"
    return f"{times(low)} to {times(high)}"


def decimals(scale: float) -> int:
    """Return the number of decimals that show two significant digits of `scale`, from 3 to 6."""
    if scale <= 0:
        return 3
    exponent = math.floor(math.log10(scale))  # of its first significant digit
    return min(6, max(3, 1 - exponent))


def difference_sentence(a: str, b: str, d: PairedDifference) -> str:
    """`unified is lower than llama by 0.086 nats per token (95% interval 0.041 to 0.132, ...)`.

    The difference `d` is B - A, in the order of the sentence: B is the unified of the example.
    """
    if not d.has_interval:
        measured = f"{b} - {a} is {d.mean:+.3f} nats per token for this seed alone"
        return f"Not resolved: one pair gives no interval; {measured}. Add seeds."
    if verdict_below(d) != NOT_RESOLVED:
        return _resolved_sentence(a, b, d)

    n = decimals(d.smallest_resolvable)
    ends = f"{d.low:+.{n}f} to {d.high:+.{n}f} nats per token"
    measured = f"the {percent(d.confidence)} interval of {b} - {a}, {ends}"
    if verdict_inside(d, MARGIN) == HOLDS:
        equal = f"{b} and {a} are equal within {MARGIN:g}"
        return f"{equal}: {measured}, lies inside ({pairs_words(d)})."
    scatter = f" ({d.scatter})" if d.scatter else ""
    smallest = f"a difference of about {d.smallest_resolvable:.{n}f}{scatter}"
    return f"Not resolved: {measured}, covers zero; {count_pairs(d.n)} could show {smallest}."


def _resolved_sentence(a: str, b: str, d: PairedDifference) -> str:
    """Return which arm is lower, by how much."""
    word = "higher"
    if d.mean < 0:
        word = "lower"
        d = d.negated()
    n = decimals(d.smallest_resolvable)
    within = f"{percent(d.confidence)} interval {d.low:.{n}f} to {d.high:.{n}f}, {pairs_words(d)}"
    return f"{b} is {word} than {a} by {d.mean:.{n}f} nats per token ({within})."


def tokens_sentence(a: str, b: str, e: TokenEfficiency, confidence: float = 0.95) -> str:
    """Return `tokens_words` as a sentence, or why there is no factor."""
    if not e.has_factor:
        return f"{b} against {a}: no token factor, because {e.why_not}."
    return f"{tokens_words(a, b, e, confidence)}."


def tokens_words(a: str, b: str, e: TokenEfficiency, confidence: float) -> str:
    """`llama needs 1.24 times the tokens of unified to reach the higher final loss (...)`."""
    within = "one pair, no interval"
    if e.has_interval:
        ends = ratio_interval_text(e.low, e.high)
        within = f"{percent(confidence)} interval {ends}, {e.n} pairs"
    needs = f"{a} needs {times(e.factor)} times the tokens of {b}"
    return f"{needs} to reach the higher final loss ({within})"
