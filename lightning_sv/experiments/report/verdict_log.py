"""Log of all recorded verdicts, results/log.csv, to which `lightning-sv paper` appends."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from lightning_sv.analysis.verdicts import NOT_TESTABLE
from lightning_sv.errors import expect
from lightning_sv.experiments.report.tables import write_csv
from lightning_sv.experiments.results import Figure, Verdict
from lightning_sv.runs.results_csv import read_csv

LOG = Path("results/log.csv")
_COLUMNS = (
    "date", "budget", "figure", "claim", "estimate", "low", "high", "n", "verdict", "p", "corrected",
    "commit", "corpus", "machine",
)  # fmt: skip
Row = dict[str, str]


def log_rows(figures: Sequence[Figure], budget: str) -> list[Row]:
    """Return one row per tested claim, with the latest date, the commits, corpora and machines of its runs."""
    rows = []
    for figure in figures:
        runs = [run.summary for panel in figure.panels for arm in panel.arms for run in arm.runs]
        facts = {"date": max((str(run.get("date") or "") for run in runs), default=""), "budget": budget}
        for column, key in (("commit", "commit"), ("corpus", "corpus_hash"), ("machine", "machine")):
            facts[column] = "; ".join(sorted({str(run[key]) for run in runs if run.get(key)}))
        for verdict in figure.verdicts:
            if verdict.verdict != NOT_TESTABLE:
                row = {**vars(verdict), **facts, "figure": figure.spec.name, "claim": figure.claim(verdict)}
                rows.append({column: _text(row.get(column)) for column in _COLUMNS})
    return rows


def read_log(path: Path = LOG) -> list[Row]:
    """Return all rows, the oldest first; empty if the file does not exist."""
    if not path.is_file():
        return []
    columns, rows = read_csv(path)
    expect(columns == _COLUMNS, str(path), "not a log of verdicts", f"the columns {', '.join(_COLUMNS)}. Move it.")
    return list(rows.values())


def add_to_log(rows: Iterable[Row], path: Path = LOG) -> int:
    """Add rows that the log does not have, whatever their date; return their number."""
    old = read_log(path)
    known = {_content(row) for row in old}
    new = [row for content, row in {_content(row): row for row in rows}.items() if content not in known]
    if new:
        write_csv(path, [*old, *new])
    return len(new)


def with_earlier(figures: Sequence[Figure], budget: str, log: Sequence[Row]) -> list[Figure]:
    """Add the earlier recorded verdicts of the same claim and budget to the verdicts of figures."""
    current = {_content(row) for row in log_rows(figures, budget)}
    before: dict[tuple[str, str], list[Row]] = {}
    for row in log:
        if row["budget"] == budget and _content(row) not in current:
            before.setdefault((row["figure"], row["claim"]), []).append(row)

    def add(figure: Figure, verdict: Verdict) -> Verdict:
        rows = before.get((figure.spec.name, figure.claim(verdict)), [])
        changes = [(word, next(group)["date"]) for word, group in groupby(rows, lambda row: row["verdict"])]
        return replace(verdict, earlier=", then ".join(f"{word} ({date[:10]})" for word, date in changes))

    return [replace(f, verdicts=tuple(add(f, verdict) for verdict in f.verdicts)) for f in figures]


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)


def _content(row: Row) -> tuple[str, ...]:
    return tuple(row[column] for column in _COLUMNS if column != "date")
