"""Paired numbers -> one of four words: what an interval says about a bound."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightning_sv.analysis.paired import PairedDifference, paired_difference, percent
from lightning_sv.experiments.pair import digits
from lightning_sv.experiments.results import ArmResult, VerdictWord
from lightning_sv.runs.events import VAL_LOSS

HOLDS: VerdictWord = "holds"
CONTRADICTED: VerdictWord = "contradicted"
NOT_RESOLVED: VerdictWord = "not resolved"
NOT_TESTABLE: VerdictWord = "not testable at this scale"


class Found(NamedTuple):
    """What one claim came to: the word, the figures behind it and their unit, and the sentence about them."""

    word: VerdictWord
    d: PairedDifference
    detail: str
    unit: str = "nats per token"


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


def losses_at(arm: ArmResult, tokens: Sequence[float]) -> list[float]:
    """Validation loss of every run at its number of tokens, linear between evaluations.

    Raises:
        ValueError: A run ends before, or begins after, its number of tokens.
    """
    found = []
    for run, at in zip(arm.runs, tokens, strict=True):
        curve = run.curve(VAL_LOSS)
        if not curve.tokens[0] <= at <= curve.tokens[-1]:
            raise ValueError(
                f"{run.dir} has no validation loss around {at:,.0f} tokens, only from {curve.tokens[0]:,} to "
                f"{curve.tokens[-1]:,}; set data.validations, or another share in the claim."
            )
        found.append(float(np.interp(at, curve.tokens, curve.values)))
    return found


def difference(a: ArmResult, b: ArmResult, share: float = 1.0) -> PairedDifference:
    """A - B over the pairs, at a share of B's tokens; at 1 each at its own end."""
    if share == 1.0:
        return paired_difference([r.val_loss for r in b.runs], [r.val_loss for r in a.runs])
    tokens = [share * run.tokens for run in b.runs]
    return paired_difference(losses_at(b, tokens), losses_at(a, tokens))


def interval(d: PairedDifference, what: str, unit: str = "nats per token") -> str:
    """`unified - llama is -0.086 nats per token (95% interval -0.132 to -0.041, 3 pairs)`."""
    unit = f" {unit}" if unit else ""
    if d.low is None or d.high is None:
        return f"{what} is {d.mean:+.3f}{unit} in the only pair, which gives no interval"
    n = digits((d.high - d.low) / 2)
    within = f"{percent(d.confidence)} interval {d.low:+.{n}f} to {d.high:+.{n}f}, {d.n} pairs"
    return f"{what} is {d.mean:+.{n}f}{unit} ({within})"
