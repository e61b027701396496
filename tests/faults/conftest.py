"""Faults: what was tried, what the program recovered from, what it lost; a table at the end of the session.

`make test-faults` runs what is marked `faults`; with FAULTS_JSON=PATH the table is also written there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest


class Tally:
    """Counts, for every fault, how often it was tried and how often the program came through.

    `tally("kill -9 during a step", recovered=True)` counts one try.
    """

    def __init__(self) -> None:
        #: fault -> [tries, recovered]: plain values, which cross from a worker of pytest-xdist in its test's report
        self.counts: dict[str, list[int]] = {}

    def __call__(self, fault: str, recovered: bool) -> None:
        self.add(fault, 1, int(recovered))

    def add(self, fault: str, tries: int, recovered: int) -> None:
        count = self.counts.setdefault(fault, [0, 0])
        count[0] += tries
        count[1] += recovered

    def rows(self) -> list[dict[str, str | int]]:
        """One row a fault, in the order of the first try."""
        return [
            {"fault": fault, "tries": tries, "recovered": recovered, "lost": tries - recovered}
            for fault, (tries, recovered) in self.counts.items()
        ]


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Tally:
    """The test's tally; count a try also where the test then fails."""
    made = Tally()
    request.node.user_properties.append(("faults", made.counts))
    return made


def together(reports: Iterable[object]) -> Tally:
    """The tallies of all tests, in the order of their names."""
    whole = Tally()
    called = [report for report in reports if isinstance(report, pytest.TestReport) and report.when == "call"]
    for report in sorted(called, key=lambda report: report.nodeid):
        for fault, (tries, recovered) in dict(report.user_properties).get("faults", {}).items():  # type: ignore[attr-defined]
            whole.add(fault, tries, recovered)
    return whole


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows = together(report for reports in terminalreporter.stats.values() for report in reports).rows()
    if not rows:
        return
    terminalreporter.section("faults")
    width = max(len(str(row["fault"])) for row in rows)
    terminalreporter.write_line(f"{'fault':{width}} {'tries':>7} {'recovered':>9} {'lost':>5}")
    for row in rows:
        text = f"{row['fault']:{width}} {row['tries']:7,} {row['recovered']:9,} {row['lost']:5,}"
        terminalreporter.write_line(text, red=bool(row["lost"]))
    if path := os.environ.get("FAULTS_JSON"):
        Path(path).write_text(json.dumps(rows, indent=2) + "\n")
