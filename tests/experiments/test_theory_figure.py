"""Figure 11 of `make paper`: the claims of OR's theorem as `make theory` recorded them."""

import json
from pathlib import Path

import pytest

from lightning_sv.experiments.overhead import measured_table
from lightning_sv.experiments.sources.figures import load_figure
from lightning_sv.theory.claims import CLAIMS

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "results/theory/theory.json"


def test_figure_11_has_the_recorded_claims() -> None:
    (panel,) = load_figure("or-theorem", ROOT / "conf").panels
    assert panel.file is not None and ROOT / panel.file == RECORDED
    table = measured_table(RECORDED)
    assert [row[0] for row in table.rows] == ["(i)", "(ii)", "(iii)", "P"]
    assert {row[-1] for row in table.rows} == {"holds"} and "or.png" in table.note
    (ratio,) = [str(row[3]) for row in table.rows if row[0] == "(iii)"]
    assert ratio.startswith("0.9999")  # below 1, and not rounded to it


def test_what_is_recorded_is_what_is_claimed() -> None:
    """A claim that was added or reworded needs `make theory` once more."""
    recorded = [(row["claim"], row["part"], row["statement"]) for row in json.loads(RECORDED.read_text())]
    assert sorted(recorded) == sorted((claim.claim, claim.part, claim.statement) for claim in CLAIMS)
    assert all((RECORDED.parent / f"{word}.png").exists() for word in {word for word, *_ in recorded} - {"table1"})


def test_files_that_hold_no_claims(tmp_path: Path) -> None:
    file = tmp_path / "theory.json"
    with pytest.raises(ValueError, match="make theory or make bench writes it"):
        measured_table(file)
    file.write_text("[]")
    with pytest.raises(ValueError, match="has no claim 'or'; make theory writes it"):
        measured_table(file)
    file.write_text('[{"claim": "or"}]')
    with pytest.raises(ValueError, match="has no claims .*make theory writes it"):
        measured_table(file)
