"""The tally counts what is lost, and says so in table and file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
HERE = Path(__file__).parent


def test_the_table_names_what_is_lost(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makeconftest((HERE / "conftest.py").read_text())
    pytester.makepyfile("def test_it(tally):\n    tally('cut', True)\n    tally('cut', False)\n    tally('kill', True)")
    out = pytester.path / "faults.json"
    monkeypatch.setenv("FAULTS_JSON", str(out))
    pytester.runpytest_inprocess("-p", "no:hypothesispytest").stdout.re_match_lines(
        [r"cut +2 +1 +1$", r"kill +1 +1 +0$"]
    )
    assert json.loads(out.read_text())[0] == {"fault": "cut", "tries": 2, "recovered": 1, "lost": 1}
