"""What an interval says about a bound: one of four words, alone and for a claim of several parts, and in a sentence."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from lightning_sv.analysis.paired import PairedDifference, TokenEfficiency, percent

VerdictWord = Literal["holds", "contradicted", "not resolved", "not testable here"]

HOLDS: VerdictWord = "holds"
CONTRADICTED: VerdictWord = "contradicted"
NOT_RESOLVED: VerdictWord = "not resolved"
NOT_TESTABLE: VerdictWord = "not testable here"


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


def opposite(word: VerdictWord) -> VerdictWord:
    """The word of the negated claim."""
    return {HOLDS: CONTRADICTED, CONTRADICTED: HOLDS}.get(word, word)


class Part(NamedTuple):
    """One of the several things a claim says: that a difference is below a bound, or, turned, that it is above."""

    d: PairedDifference
    bound: float = 0.0
    turned: bool = False

    def word(self, confidence: float) -> VerdictWord:
        """What an interval of some coverage says about it."""
        word = below(self.d.at(confidence), self.bound)
        return opposite(word) if self.turned else word


def all_of(parts: Sequence[Part]) -> tuple[VerdictWord, int, list[PairedDifference]]:
    """The word of a claim with several parts, the place of the part that decides, each part's interval as judged.

    The claim holds where every part does: its error is then at most that of one. One part that is contradicted is
    enough against it, so that each of k parts is looked at with the k-th of an error (Bonferroni).
    """
    alone = parts[0].d.confidence
    joint = 1 - (1 - alone) / len(parts)
    words = [part.word(alone) for part in parts]
    jointly = [part.word(joint) for part in parts]
    shown = [p.d.at(joint if word == CONTRADICTED else alone) for p, word in zip(parts, words, strict=True)]
    if CONTRADICTED in jointly:
        return CONTRADICTED, jointly.index(CONTRADICTED), shown
    unsure = [i for i, word in enumerate(words) if word != HOLDS]
    return (NOT_RESOLVED, unsure[0], shown) if unsure else (HOLDS, 0, shown)


def interval(d: PairedDifference, what: str, unit: str = "nats per token") -> str:
    """`unified - llama is -0.086 nats per token (95% interval -0.132 to -0.041, 3 pairs)`."""
    unit = f" {unit}" if unit else ""
    if d.low is None or d.high is None:
        return f"{what} is {d.mean:+.3f}{unit} in the only pair, which gives no interval"
    n = digits((d.high - d.low) / 2)
    within = f"{percent(d.confidence)} interval {d.low:+.{n}f} to {d.high:+.{n}f}, {d.n} pairs"
    return f"{what} is {d.mean:+.{n}f}{unit} ({within})"


def digits(scale: float) -> int:
    """Decimals that show two figures of ``scale``, at least three."""
    return 3 if scale <= 0 else min(6, max(3, 1 - math.floor(math.log10(scale))))


def difference_sentence(a: str, b: str, d: PairedDifference) -> str:
    """`unified is lower than llama by 0.086 nats per token (95% interval 0.041 to 0.132, 3 pairs)`.

    Args:
        a: name of the baseline
        b: name of the other arm
        d: B - A, nats per token
    """
    if d.low is None or d.high is None or d.smallest_resolvable is None:
        return (
            f"No verdict: one pair gives no interval; {b} - {a} is {d.mean:+.3f} nats per token for this seed alone. "
            "Add seeds."
        )
    n = digits(d.smallest_resolvable)
    level = f"{percent(d.confidence)} interval"
    if below(d) == NOT_RESOLVED:
        return (
            f"Not resolved: the {level} of {b} - {a}, {d.low:+.{n}f} to {d.high:+.{n}f} nats per token, covers zero; "
            f"{d.n} pairs could show a difference of about {d.smallest_resolvable:.{n}f}."
        )
    low, high = sorted((abs(d.low), abs(d.high)))
    return (
        f"{b} is {'lower' if d.mean < 0 else 'higher'} than {a} by {abs(d.mean):.{n}f} nats per token ({level} "
        f"{low:.{n}f} to {high:.{n}f}, {d.n} pairs)."
    )


def tokens_sentence(a: str, b: str, e: TokenEfficiency, confidence: float = 0.95) -> str:
    """`To llama's final loss, llama needs 1.24 times the tokens of unified (95% interval 1.17 to 1.31, 3 pairs)`.

    Args:
        a: name of the baseline
        b: name of the other arm
        e: tokens of each to A's final loss
        confidence: coverage of its interval
    """
    if e.factor is None:
        pairs = "pair" if e.n == 1 else "pairs"
        return f"{b} reaches {a}'s final loss in {e.reached} of {e.n} {pairs}: no token factor."
    within = "one pair, no interval"
    if e.low is not None and e.high is not None:
        within = f"{percent(confidence)} interval {e.low:.2f} to {e.high:.2f}, {e.n} pairs"
    return f"To {a}'s final loss, {a} needs {e.factor:.2f} times the tokens of {b} ({within})."
