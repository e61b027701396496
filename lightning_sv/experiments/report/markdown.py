"""Markdown of a report."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lightning_sv.experiments.report.tables import PAPER_TOKENS_PER_PARAM, ours_words, p_words, tokens_per_param
from lightning_sv.experiments.results import Figure, Verdict
from lightning_sv.markdown_text import markdown_text
from lightning_sv.runs.provenance import Provenance
from lightning_sv.statistics.verdicts import ALPHA, NOT_RESOLVED, NOT_TESTABLE

# headings of the claims of all figures, and of one figure
_ALL = ("figure", "claim", "verdict", "corrected", "ours, nats per token unless said", "the paper's")
_OWN = ("claim", "verdict", "corrected", "p", "in words", "ours, nats per token unless said", "the paper's")


class Section(NamedTuple):
    """Content of a panel.

    Attributes:
        pictures: (path relative to the report, alternative text)
        columns: headings of the table; empty without a table
        notes: sentences below
    """

    title: str
    pictures: Sequence[tuple[str, str]]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]


def markdown_report(
    figures: Sequence[Figure], panels: Sequence[Sequence[Section]], head: Sequence[tuple[str, str]]
) -> str:
    """Return the report; texts are escaped."""
    title = figures[0].spec.title if len(figures) == 1 else "Scale vectors: the paper's figures, regenerated"
    parts = [f"# {markdown_text(title)}", _table(["", ""], head)]
    if claims := [_claim(f, v, _ALL) for f in figures for v in f.verdicts]:
        parts += ["## Claims", _table(_ALL, claims)]
    for figure, sections in zip(figures, panels, strict=True):
        spec = figure.spec
        about = f"{spec.section}. {spec.summary} Training tokens per parameter: {figure.ratio() or 'not stated'}; "
        parts += [
            f"## {markdown_text(spec.title)}",
            _paragraph(f"{about}the paper's are {spec.paper_tokens_per_param}."),
        ]
        parts += [f"> **Warning:** {markdown_text(warning)}" for warning in figure.warnings]
        claims = [_claim(figure, v, _OWN) for v in figure.verdicts]
        parts += [_table(_OWN, claims)] if claims else []
        parts += [_table(["in the paper", ""], list(spec.paper.items()))] if spec.paper else []
        for section in sections:
            parts.append(f"### {markdown_text(section.title)}")
            parts += [f"![{markdown_text(words)}]({path})" for path, words in section.pictures]
            parts += [_table(section.columns, section.rows)] if section.columns else []
            parts += [_paragraph(note) for note in section.notes]
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", figure.command)), default=0))
        parts.append(f"{fence}sh\n{figure.command}\n{fence}")
    return "\n\n".join(parts) + "\n"


def _claim(figure: Figure, v: Verdict, columns: Sequence[str]) -> list[str]:
    texts = {
        "figure": figure.spec.title,
        "claim": figure.claim(v),
        "verdict": v.verdict,
        "corrected": v.corrected or "",
        "p": p_words(v),
        "in words": v.sentence,
        "ours, nats per token unless said": ours_words(v),
        "the paper's": v.paper or "not stated",
    }
    return [texts[column] for column in columns]


def head_lines(figures: Sequence[Figure], what: str, made: Provenance, caution: str = "") -> list[tuple[str, str]]:
    """Return the lines at the head of the report: (name, value)."""
    runs = [run for figure in figures for panel in figure.panels for arm in panel.arms for run in arm.runs]
    words = _range([tokens_per_param(run) for run in runs])
    facts = {
        key: sorted({str(run.summary[key]) for run in runs if run.summary.get(key)})
        for key in ("commit", "machine", "torch", "date")
    }
    dates = facts.pop("date")
    finished = f"from {dates[0]} to {dates[-1]}" if dates else "at a time that they do not state"
    judged = [v for figure in figures for v in figure.verdicts if v.verdict != NOT_TESTABLE]
    return [
        ("experiments", what),
        *([("read with it", caution)] if caution else []),
        *([("claims", _by_chance(judged))] if len(judged) > 1 else []),
        ("training tokens per parameter", f"{words} (the paper's are {PAPER_TOKENS_PER_PARAM})"),
        ("epochs over the training text", _range([run.summary.get("epochs") for run in runs])),
        *((f"{key} of the runs", ", ".join(values) or "not stated") for key, values in facts.items()),
        ("runs", f"{len({run.dir for run in runs})}, finished {finished}"),
        ("report written", f"{made.date}, at commit {made.commit}, on {made.machine}"),
    ]


def _range(values: Iterable[float | None]) -> str:
    """Return the smallest and the largest of the known values, once if they are equal."""
    known = [value for value in values if value is not None]
    if not known:
        return "not stated"
    ends = (f"{min(known):.3g}", f"{max(known):.3g}")
    return " to ".join(dict.fromkeys(ends))


def _by_chance(judged: Sequence[Verdict]) -> str:
    """Return sentences on the number of verdicts that are false by chance."""
    primary = [v for v in judged if v.primary]
    others = [v for v in judged if not v.primary]
    kept, others_kept = (sum(v.corrected != NOT_RESOLVED for v in verdicts) for verdicts in (primary, others))
    return (
        f"{len(judged)} claims are tested, each by one-sided tests at {ALPHA:.0%} of itself and its opposite. If all "
        f"arms were equal, about {max(1, round(2 * ALPHA * len(judged)))} would be resolved by chance. After the "
        f"correction for their number, {kept} of {len(primary)} primary ones, at most one per figure, keep their "
        f"verdict (Holm), and {others_kept} of the {len(others)} others (Benjamini-Hochberg). Claims that share runs "
        "are not independent. Differences of losses use the variance of all arms of one model and budget, if it is "
        "equal."
    )


def _paragraph(words: str) -> str:
    """Escape a text at the start of a paragraph, so that a number or a dash does not begin a list."""
    return re.sub(r"^(\d*)([-+=.)])", r"\1\\\2", markdown_text(words))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table without empty columns."""
    kept = [i for i in range(len(columns)) if not rows or any(row[i] for row in rows)]
    columns, *rows = ([line[i] for i in kept] for line in (columns, *rows))
    lines = [map(markdown_text, columns), ["---"] * len(columns), *(map(markdown_text, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
