"""The benchmark of preparing a corpus: its text, and its summary."""

import json
from pathlib import Path

from benchmarks.corpus import Measured, summarize, write_text


def test_written_text_has_a_size_and_no_duplicates(tmp_path: Path) -> None:
    source = tmp_path / "source.jsonl"
    source.write_text('{"text": "one"}\n{"text": "two"}\n')
    target = tmp_path / "text.jsonl"
    n_bytes = write_text(source, target, 1000)
    lines = target.read_text().splitlines()
    assert 1000 <= n_bytes == target.stat().st_size < 1000 + len(lines[-1]) + 1
    assert len(set(lines)) == len(lines)
    assert json.loads(lines[3]) == {"text": "3 two"}


def test_summary_compares_each_round_with_one_process() -> None:
    measured = {
        1: [Measured(8.0, 8.0, 0.5), Measured(10.0, 9.0, 0.6)],
        2: [Measured(4.0, 9.0, 0.4), Measured(8.0, 9.0, 0.3)],
    }
    summary = summarize(measured, n_bytes=80_000_000)
    assert summary["1"] == {"mb_per_s": 9.0, "share_of_linear": 1.0, "largest_gb": 0.6}
    assert summary["2"] == {"mb_per_s": 15.0, "share_of_linear": 0.812, "largest_gb": 0.4}
