"""Faults: what was tried, what the program recovered from, what it lost; a table at the end of the session.

`make test-faults` runs what is marked `faults`; with FAULTS_JSON=PATH the table is also written there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest


class Tally:
    """Counts, for every fault, how often it was tried and how often the program came through.

    `tally("kill -9 during a step", recovered=True)` counts one try.
    """

    def __init__(self) -> None:
        self.tries: dict[str, int] = {}
        self.recovered: dict[str, int] = {}

    def __call__(self, fault: str, recovered: bool) -> None:
        self.tries[fault] = self.tries.get(fault, 0) + 1
        self.recovered[fault] = self.recovered.get(fault, 0) + recovered

    def rows(self) -> list[dict[str, str | int]]:
        """One row a fault, in the order of the first try."""
        return [
            {"fault": fault, "tries": n, "recovered": self.recovered[fault], "lost": n - self.recovered[fault]}
            for fault, n in self.tries.items()
        ]


_TALLY = pytest.StashKey[Tally]()


@pytest.fixture(scope="session")
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    """The session's tally; count a try also where the test then fails."""
    yield request.config.stash.setdefault(_TALLY, Tally())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(_TALLY, Tally()).rows()
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
