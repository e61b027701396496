"""Verdicts among each other: the first of a figure, what is left when all are counted; and the paper's number."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from lightning_sv.analysis.decision import ALPHA, NOT_RESOLVED, NOT_TESTABLE
from lightning_sv.analysis.pooled import benjamini_hochberg, holm
from lightning_sv.experiments.claims.outcome import Verdict
from lightning_sv.experiments.results import Figure
from lightning_sv.experiments.spec import ClaimSpec


def one_primary(claims: Sequence[tuple[ClaimSpec, Sequence[Verdict]]]) -> tuple[Verdict, ...]:
    """The verdicts of a figure, each once, one of them primary.

    Of the claim that its YAML says, or else of the first that can be tested; of its sizes the largest that can.

    Args:
        claims: each with its verdicts; a part of one may be all of another
    """
    able = [(claim, [v for v in found if v.verdict != NOT_TESTABLE]) for claim, found in claims]
    said = [found for claim, found in able if claim.primary] or [found for _, found in able if found]
    primary = said[0][-1:] if said else []
    once: dict[tuple[str, str], Verdict] = {}
    for _, found in claims:
        for verdict in found:
            once.setdefault((verdict.panel, verdict.claim), verdict)
    marked = {(verdict.panel, verdict.claim) for verdict in primary}
    return tuple(replace(verdict, primary=key in marked) for key, verdict in once.items())


def with_papers_number(verdict: Verdict, papers_own: bool) -> Verdict:
    """A verdict that says whether its interval holds the paper's number, where runs are of its models and tokens."""
    value, low, high = verdict.paper_value, verdict.low, verdict.high
    if not papers_own or value is None or low is None or high is None:
        return replace(verdict, paper_value=None)
    inside = low <= value <= high
    words = f"{verdict.sentence[:-1]}; the paper's {value:+g} lies {'inside' if inside else 'outside'}."
    return replace(verdict, sentence=words, agreement="consistent" if inside else "not consistent")


def corrected(figures: Sequence[Figure]) -> list[Figure]:
    """Figures whose verdicts say what is left of them: Holm over the primary ones, Benjamini-Hochberg over the rest.

    Among the primary ones that are left no false one is with probability 0.95; of the others that are left one in
    twenty is expected to be.

    Args:
        figures: all that are judged together
    """
    tested = [v for figure in figures for v in figure.verdicts if v.p is not None]
    found: dict[Verdict, float] = {}
    for primary, rule in ((True, holm), (False, benjamini_hochberg)):
        found |= _p_values([v for v in tested if v.primary == primary], rule)
    return [replace(f, verdicts=tuple(_left(v, found.get(v)) for v in f.verdicts)) for f in figures]


def _p_values(verdicts: Sequence[Verdict], rule: Callable[[Sequence[float]], list[float]]) -> dict[Verdict, float]:
    p_values = rule([v.p for v in verdicts if v.p is not None])
    return dict(zip(verdicts, p_values, strict=True))


def _left(verdict: Verdict, p: float | None) -> Verdict:
    gone = verdict.verdict != NOT_TESTABLE and (p is None or p >= ALPHA)
    return replace(verdict, p_corrected=p, corrected=NOT_RESOLVED if gone else verdict.verdict)
