"""Folder of a report: names of its pages, and whether it may be overwritten; no matplotlib."""

from collections.abc import Iterable
from pathlib import Path

from lightning_sv.atomic import check_writable
from lightning_sv.errors import ConfigError
from lightning_sv.experiments.report.results_csv import RESULTS, read_rows

MARKDOWN = "report.md"
HTML = "report.html"


def check_replaceable(out: Path, ours: Iterable[Path]) -> None:
    """Check that a report may be written into a folder.

    Args:
        out: folder of the report
        ours: run directories of the report, or folders of them

    Raises:
        ConfigError: the folder has a report of none of these runs, or a file that no report wrote
    """
    check_writable(out)
    if not _has_report(out):
        for name in (RESULTS, MARKDOWN, HTML):
            if (out / name).exists():
                what = f"a {name} that lightning-sv did not write"
                raise ConfigError(f"{out} contains {what}; choose a different --out.")
        return

    runs = reported_runs(out)
    folders = [run.parent for run in runs]
    places = {*runs, *folders}
    if runs and places.isdisjoint(path.resolve() for path in ours):
        what = f"a report of other runs ({runs[0]})"
        raise ConfigError(f"{out} contains {what}; choose a different --out.")


def _has_report(out: Path) -> bool:
    """Return whether the table of runs is that of a report; it is empty without runs."""
    results = out / RESULTS
    return results.exists() and all("run" in row for _, row in read_rows(results))


def reported_runs(out: Path) -> list[Path]:
    """Return the absolute run directories of the report in a folder; none without a report."""
    if not _has_report(out):
        return []
    return [(out / row["run"]).resolve() for _, row in read_rows(out / RESULTS)]
