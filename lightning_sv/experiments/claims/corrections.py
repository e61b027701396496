"""Corrections of the p values of verdicts for their number."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from lightning_sv.experiments.results import Figure, Verdict
from lightning_sv.statistics.verdicts import ALPHA, NOT_RESOLVED, NOT_TESTABLE


def correct_verdicts(figures: Sequence[Figure]) -> list[Figure]:
    """Correct the verdicts of figures for their number.

    Holm for the primary ones: with probability 0.95, none that remains is false.
    Benjamini-Hochberg for the others: of those that remain, one in twenty is expected to be false.
    """
    primary = []
    others = []
    for verdict in chain.from_iterable(figure.verdicts for figure in figures):
        if math.isnan(verdict.p):
            continue
        if verdict.primary:
            primary.append(verdict)
        else:
            others.append(verdict)
    p_values = _corrected(primary, holm) | _corrected(others, benjamini_hochberg)

    corrected = []
    for figure in figures:
        verdicts = [_with_p(verdict, p_values) for verdict in figure.verdicts]
        corrected.append(replace(figure, verdicts=tuple(verdicts)))
    return corrected


def _corrected(
    verdicts: Sequence[Verdict], rule: Callable[[Sequence[float]], list[float]]
) -> dict[Verdict, float]:
    """Return verdict -> corrected p value.

    A one-sided p value counts twice, because the opposite of the claim is tested too.
    """
    two_sided = [min(1.0, 2 * verdict.p) for verdict in verdicts]
    return dict(zip(verdicts, rule(two_sided), strict=True))


def _with_p(verdict: Verdict, p_values: Mapping[Verdict, float]) -> Verdict:
    """Return a verdict with its corrected p value, which may take away its decision."""
    p = p_values.get(verdict, math.nan)
    word = verdict.verdict
    is_decided = word == NOT_TESTABLE or p < ALPHA
    if not is_decided:
        word = NOT_RESOLVED
    return replace(verdict, p_corrected=p, corrected=word)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p values (N,): with probability 1 - alpha, none below alpha is false.

    S. Holm, A simple sequentially rejective multiple test procedure, Scand. J. Statist. 6 (1979).
    """
    n = len(p_values)
    order = np.argsort(p_values)
    scaled = np.minimum(1.0, (n - np.arange(n)) * np.sort(p_values))
    corrected = np.empty(n)
    corrected[order] = np.maximum.accumulate(scaled)
    return [float(p) for p in corrected]


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Correct p values (N,): of those below alpha, a share of alpha is expected to be false.

    Y. Benjamini and Y. Hochberg, Controlling the false discovery rate, J. R. Statist. Soc. B 57
    (1995).
    """
    if not p_values:
        return []
    from scipy.stats import false_discovery_control  # the import takes a second

    return [float(p) for p in false_discovery_control(p_values)]
