"""Corrections of verdicts for their number: of many claims some come out by chance."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lightning_sv.analysis.verdicts import ALPHA, NOT_RESOLVED, NOT_TESTABLE
from lightning_sv.experiments.claims.verdict import Verdict
from lightning_sv.experiments.results import Figure
from lightning_sv.experiments.spec import ClaimSpec


def one_primary(claims: Sequence[tuple[ClaimSpec, Sequence[Verdict]]]) -> tuple[Verdict, ...]:
    """The verdicts of a figure, each once, one of them primary.

    Of the claim that its YAML says, or else of the first that can be tested; of its sizes the largest that can.
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


def corrected(figures: Sequence[Figure]) -> list[Figure]:
    """Figures whose verdicts say what is left of them: Holm over the primary ones, Benjamini-Hochberg over the rest.

    A claim that is tested by one side asks twice, for its opposite is tested too, so its p counts twice. Then among the
    primary ones that are left no false one is with probability 0.95; of the others that are left one in twenty is
    expected to be.
    """
    tested = [v for figure in figures for v in figure.verdicts if v.p is not None]
    found: dict[Verdict, float] = {}
    for primary, rule in ((True, holm), (False, benjamini_hochberg)):
        asked = [v for v in tested if v.primary == primary]
        found |= dict(zip(asked, rule([min(1.0, 2 / v.sides * v.p) for v in asked if v.p is not None]), strict=True))
    return [replace(f, verdicts=tuple(_left(v, found.get(v)) for v in f.verdicts)) for f in figures]


def _left(verdict: Verdict, p: float | None) -> Verdict:
    gone = verdict.verdict != NOT_TESTABLE and (p is None or p >= ALPHA)
    return replace(verdict, p_corrected=p, corrected=NOT_RESOLVED if gone else verdict.verdict)


def holm(p_values: Sequence[float]) -> list[float]:
    """P values corrected for their number: all below alpha are true findings with probability 1 - alpha.

    S. Holm, A simple sequentially rejective multiple test procedure, Scand. J. Statist. 6 (1979).

    Args:
        p_values: (N,) one a claim
    """
    order, n = np.argsort(p_values), len(p_values)
    corrected = np.empty(n)
    corrected[order] = np.maximum.accumulate(np.minimum(1.0, (n - np.arange(n)) * np.sort(p_values)))
    return [float(p) for p in corrected]


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """P values corrected for their number: of all below alpha a share of alpha at most is expected to be false.

    Y. Benjamini and Y. Hochberg, Controlling the false discovery rate, J. R. Statist. Soc. B 57 (1995).

    Args:
        p_values: (N,) one a claim
    """
    if not p_values:
        return []
    from scipy.stats import false_discovery_control

    return [float(p) for p in false_discovery_control(p_values)]
