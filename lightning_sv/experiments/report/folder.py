"""Folder of a report: names of its pages, and whether it may be overwritten; no matplotlib."""

from collections.abc import Iterable
from pathlib import Path

from lightning_sv.atomic import check_writable
from lightning_sv.errors import ConfigError
from lightning_sv.experiments.report.results_csv import RESULTS, read_csv

MARKDOWN = "report.md"
HTML = "report.html"


def check_replaceable(out: Path, ours: Iterable[Path]) -> None:
    """Refuse to overwrite a report that has none of `ours`, or a file that no report wrote."""
    check_writable(out)
    existing = [name for name in (RESULTS, MARKDOWN, HTML) if (out / name).exists()]
    if not existing or _is_report_without_runs(out):
        return
    runs = reported_runs(out)
    known = {path.resolve() for path in ours}
    if any({run, run.parent} & known for run in runs):
        return
    what = f"a {existing[0]} that lightning-sv did not write"
    if runs:
        what = f"a report of other runs ({runs[0]})"
    raise ConfigError(f"{out} contains {what}; choose a different --out.")


def _is_report_without_runs(out: Path) -> bool:
    """Return whether the table of runs is empty, so that the report has nothing to lose."""
    results = out / RESULTS
    if not results.exists():
        return False
    columns, _ = read_csv(results)
    return not columns


def reported_runs(out: Path) -> list[Path]:
    """Return the absolute run directories of the report in a folder; none without a report."""
    results = out / RESULTS
    if not results.exists():
        return []
    _, rows = read_csv(results)
    names = [row["run"] for row in rows.values() if row.get("run")]
    # Reports of earlier versions have paths relative to the working directory.
    return [path.resolve() for path in (*(out / name for name in names), *map(Path, names))]
