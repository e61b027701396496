"""Faults: the tried ones and the recovery of the program, in a table at the end of the session.

`make test-faults` runs the tests marked `faults`; with FAULTS_JSON=PATH the table is also written
there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import chain
from operator import attrgetter

import pandas as pd
import pytest

Tally = Callable[..., None]


@pytest.fixture
def tally(record_property: Callable[[str, object], None]) -> Tally:
    """Count a try of a fault, and fail unless the program came through: `tally("kill -9",
    recovered, output)`."""

    def count(fault: str, recovered: bool, *shown: object) -> None:
        record_property(fault, recovered)
        assert recovered, shown

    return count


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = chain.from_iterable(terminalreporter.stats.values())
    called = [each for each in reports if getattr(each, "when", "") == "call"]
    properties: list[tuple[str, object]] = []
    for each in sorted(called, key=attrgetter("nodeid")):
        properties += each.user_properties
    tries = pd.DataFrame(properties, columns=["fault", "recovered"])
    if tries.empty:
        return
    rows = (
        tries.groupby("fault", sort=False)
        .recovered.agg(tries="size", recovered="sum")
        .astype(int)
        .reset_index()
    )
    rows["lost"] = rows.tries - rows.recovered
    terminalreporter.section("faults")
    terminalreporter.write_line(rows.to_string(index=False))
    path = os.environ.get("FAULTS_JSON")
    if path:
        rows.to_json(path, orient="records", indent=2)
