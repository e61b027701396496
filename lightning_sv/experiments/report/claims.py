"""Verdicts on claims: rows of verdicts.csv, and the table of a report."""

from collections.abc import Sequence
from math import isnan

import pandas as pd

from lightning_sv.experiments.results import Figure, Verdict
from lightning_sv.statistics.paired import percent
from lightning_sv.statistics.verdicts import (
    count_pairs,
    interval_text,
    ratio_interval_text,
    times,
)


def verdict_frame(figures: Sequence[Figure]) -> pd.DataFrame:
    """Return one row per claim, with all numbers of its verdict."""
    rows = []
    for figure in figures:
        rows += [{"figure": figure.spec.name, **vars(verdict)} for verdict in figure.verdicts]
    return pd.DataFrame(rows, dtype=object)


def claim_table(figure: Figure) -> pd.DataFrame:
    """Return one row per claim of a figure, as texts."""
    rows = [_claim_cells(figure, verdict) for verdict in figure.verdicts]
    return pd.DataFrame(rows, dtype=object)


def _claim_cells(figure: Figure, verdict: Verdict) -> dict[str, str]:
    return {
        "figure": figure.spec.title,
        "claim": figure.statement(verdict),
        "verdict": verdict.verdict,
        "corrected": verdict.corrected or "",
        "p": _p_text(verdict),
        "in words": verdict.sentence,
        "ours, nats per token unless said": estimate_text(verdict),
        "the paper's": verdict.paper or "not stated",
    }


def _p_text(verdict: Verdict) -> str:
    """Return the p value and the corrected one: `0.004; 0.03 of the primary claims`."""
    if isnan(verdict.p):
        return ""
    claims = "the primary claims" if verdict.primary else "all others"
    return f"{verdict.p:.2g}; {verdict.p_corrected:.2g} of {claims}"


def estimate_text(verdict: Verdict) -> str:
    """Return the estimate of a claim with its unit, interval and number of pairs."""
    if isnan(verdict.estimate):
        return "not measured"

    basis = f"{percent(verdict.confidence)}, {count_pairs(verdict.n)}"
    if not isnan(verdict.own_low):
        basis += f"; by their own scatter {interval_text(verdict.own_low, verdict.own_high)}"

    if verdict.unit == "times":
        interval = ratio_interval_text(verdict.low, verdict.high)
        return f"{times(verdict.estimate)} times ({interval}; {basis})"
    unit = "" if verdict.unit == "nats per token" else f" {verdict.unit}"
    interval = interval_text(verdict.low, verdict.high)
    return f"{verdict.estimate:+.4f}{unit} ({interval}; {basis})"
