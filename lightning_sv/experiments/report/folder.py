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
    if not (out / RESULTS).exists():
        for name in (MARKDOWN, HTML):
            if (out / name).exists():
                what = f"a {name} that lightning-sv did not write"
                raise ConfigError(f"{out} contains {what}; choose a different --out.")

    runs = reported_runs(out)
    folders = [run.parent for run in runs]
    is_of_others = {*runs, *folders}.isdisjoint(path.resolve() for path in ours)
    if runs and is_of_others:
        what = f"{RESULTS} of other runs ({runs[0]})"
        raise ConfigError(f"{out} contains {what}; choose a different --out.")


def reported_runs(out: Path) -> list[Path]:
    """Return the absolute run directories of the table of runs in a folder; none without it."""
    results = out / RESULTS
    if not results.exists():
        return []
    # a table of something else has no such directory
    return [(out / row.get("run", "/")).resolve() for _, row in read_rows(results)]
