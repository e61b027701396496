"""`results/record.py`: a row of docs/records.md only for a record."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
add = runpy.run_path(str(ROOT / "results/record.py"))["add"]
ARM = {"scale": "hg+dp+or", "args": ["--model.optim.lr=0.0065", "--trainer.max_steps=5"], "val_loss": 3.5618}


def comparison(folder: Path, high: float, seconds: float) -> Path:
    difference = {"mean": -0.0154, "low": -0.03, "high": high}
    runs = [{"name": name, "summary": {"seconds": time}} for name, time in (("a-seed0", 10.0), ("b-seed0", seconds))]
    numbers = {"date": "2026-11-26T10:00:00+00:00", "arms": [{}, ARM], "runs": runs}
    path = folder / "comparison.json"
    path.write_text(json.dumps(numbers | {"differences": [{"b": "hg+dp+or", "difference": difference}]}))
    return path


def test_record_lower_interval_adds_the_last_row(tmp_path: Path) -> None:
    page = tmp_path / "records.md"
    page.write_text("# Records\n\n| a |\n|---|\n| 1 |\n\nThe end.\n")
    add(comparison(tmp_path, high=-0.001, seconds=10.9), page)
    row = "| 2026-11-26 | `hg+dp+or` | 0.0065, default | −0.015 (−0.030 to −0.001) | 3.562 |"
    assert page.read_text() == f"# Records\n\n| a |\n|---|\n| 1 |\n{row}\n\nThe end.\n"


@pytest.mark.parametrize(("high", "seconds"), [(0.001, 10.0), (-0.001, 11.1)])
def test_record_unresolved_or_slow_challenger_exits(tmp_path: Path, high: float, seconds: float) -> None:
    with pytest.raises(SystemExit, match="not a record"):
        add(comparison(tmp_path, high, seconds), tmp_path / "records.md")
