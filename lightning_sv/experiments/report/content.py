"""Sections of a report, and the facts at its head; `markdown` renders them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import pandas as pd

from lightning_sv.experiments.results import Figure, runs_of_figures, tokens_per_param_text
from lightning_sv.runs.events import Run
from lightning_sv.runs.provenance import Provenance
from lightning_sv.statistics.verdicts import ALPHA, NOT_RESOLVED, NOT_TESTABLE

PAPER_TOKENS_PER_PARAM = 100


@dataclass(frozen=True)
class Picture:
    """A picture: its path relative to the report, and an alternative text."""

    path: str
    alt: str


@dataclass(frozen=True)
class Section:
    """Part of a figure: pictures, a table of texts without index, and sentences below."""

    title: str
    pictures: Sequence[Picture] = ()
    table: pd.DataFrame = field(default_factory=pd.DataFrame)
    notes: Sequence[str] = ()


def without_empty_columns(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table of texts without the columns whose cells are all empty."""
    if table.empty:
        return table
    return table.loc[:, (table != "").any()]


def head_facts(
    figures: Sequence[Figure], what: str, made: Provenance, caution: str = ""
) -> dict[str, str]:
    """Return the facts at the head of a report: what it is about, its claims, and its runs."""
    facts = {"experiments": what}
    if caution:
        facts["read with it"] = caution
    facts |= _claim_facts(figures)
    facts |= _run_facts(runs_of_figures(figures))
    facts["report written"] = f"{made.date}, at commit {made.commit}, on {made.machine}"
    return facts


def _claim_facts(figures: Sequence[Figure]) -> dict[str, str]:
    """Return the verdicts and the number of false ones; nothing for fewer than two claims."""
    every = list(chain.from_iterable(figure.verdicts for figure in figures))
    verdicts = pd.DataFrame(every, columns=["verdict", "corrected", "primary"])
    judged = verdicts[verdicts.verdict != NOT_TESTABLE]
    if len(judged) < 2:
        return {}
    counts = [f"{word}: {count}" for word, count in verdicts.verdict.value_counts().items()]
    return {"verdicts": "; ".join(counts), "claims": _resolved_by_chance(judged)}


def _run_facts(runs: Sequence[Run]) -> dict[str, str]:
    ratios = tokens_per_param_text(runs) or "not stated"
    facts = {
        "training tokens per parameter": f"{ratios} (the paper's are {PAPER_TOKENS_PER_PARAM})",
        "epochs over the training text": _range_text([run.summary.get("epochs") for run in runs]),
    }
    for key in ("commit", "machine", "torch"):
        facts[f"{key} of the runs"] = ", ".join(_values(runs, key)) or "not stated"
    facts["runs"] = f"{len({run.dir for run in runs})}, finished {_period(runs)}"
    return facts


def _values(runs: Sequence[Run], key: str) -> list[str]:
    """Return the different values of a key of the summaries, sorted."""
    values = set[str]()
    for run in runs:
        value = run.summary.get(key)
        if value:
            values.add(str(value))
    return sorted(values)


def _period(runs: Sequence[Run]) -> str:
    dates = _values(runs, "date")
    if not dates:
        return "at a time that they do not state"
    return f"from {dates[0]} to {dates[-1]}"


def _range_text(values: Iterable[float | None]) -> str:
    """Return the smallest and the largest of the known values, once if they are equal."""
    known = pd.Series(list(values), dtype=float).dropna()
    if known.empty:
        return "not stated"
    ends = [f"{known.min():.3g}", f"{known.max():.3g}"]
    return " to ".join(dict.fromkeys(ends))


def _resolved_by_chance(judged: pd.DataFrame) -> str:
    """Return sentences on the number of verdicts that are false by chance."""
    is_primary = judged.primary.astype(bool)
    primary = judged[is_primary]
    others = judged[~is_primary]
    by_chance = max(1, round(2 * ALPHA * len(judged)))
    return (
        f"{len(judged)} claims are tested, each by one-sided tests at {ALPHA:.0%} of itself and "
        f"its opposite. If all arms were equal, about {by_chance} would be resolved by chance. "
        f"After the correction for their number, {_count_kept(primary)} of {len(primary)} primary "
        f"ones, at most one per figure, keep their verdict (Holm), and {_count_kept(others)} of "
        f"the {len(others)} others (Benjamini-Hochberg). Claims that share runs are not "
        "independent. A difference of losses uses the variance of the arms of its figure that "
        "train on as many tokens, without those that scatter more."
    )


def _count_kept(verdicts: pd.DataFrame) -> int:
    return int((verdicts.corrected != NOT_RESOLVED).sum())
