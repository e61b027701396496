"""The tally counts what is lost, and says so in table and file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
HERE = Path(__file__).parent


@pytest.mark.parametrize("workers", ["0", "2"])
def test_the_table_names_what_is_lost(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, workers: str) -> None:
    pytester.makeconftest((HERE / "conftest.py").read_text())
    pytester.makepyfile(
        "import pytest\n@pytest.mark.parametrize('n', range(2))\ndef test_it(tally, n):\n    tally('cut', True)\n"
        "    tally('cut', False)\n    tally('kill', True)\n    assert n"
    )
    out = pytester.path / "faults.json"
    monkeypatch.setenv("FAULTS_JSON", str(out))
    done = pytester.runpytest_subprocess("-p", "no:hypothesispytest", "-n", workers)
    done.stdout.re_match_lines([r"cut +4 +2 +2$", r"kill +2 +2 +0$"])
    assert json.loads(out.read_text())[0] == {"fault": "cut", "tries": 4, "recovered": 2, "lost": 2}
