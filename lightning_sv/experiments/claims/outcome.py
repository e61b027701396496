"""What one claim comes to, and the paired difference of losses that most are about."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightning_sv.analysis.decision import VerdictWord
from lightning_sv.analysis.paired import PairedDifference, paired_difference
from lightning_sv.experiments.results import Arm
from lightning_sv.runs.events import VAL_LOSS


class Outcome(NamedTuple):
    """What one claim came to.

    Args:
        word: the verdict
        d: the figures behind it
        detail: the sentence about them
        unit: of the figures
        part: which part of the claim they are of, e.g. ``at the end``; empty where they are of all of it
    """

    word: VerdictWord
    d: PairedDifference
    detail: str
    unit: str = "nats per token"
    part: str = ""


def losses_at(arm: Arm, tokens: Sequence[float]) -> list[float]:
    """Validation loss of every run at its number of tokens, linear between evaluations.

    Raises:
        ValueError: a run ends before, or begins after, its number of tokens
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


def difference(a: Arm, b: Arm, share: float = 1.0) -> PairedDifference:
    """A - B over the pairs, at a share of B's tokens; at 1 each at its own end."""
    if share == 1.0:
        return paired_difference(b.losses, a.losses)
    tokens = [share * run.tokens for run in b.runs]
    return paired_difference(losses_at(b, tokens), losses_at(a, tokens))
