"""Figure 11 of `make paper`: recorded claims on the theorem of OR from `make theory`."""

import json
from pathlib import Path

import pytest

from lightning_sv.experiments.results import Table
from lightning_sv.experiments.spec import load_figure
from lightning_sv.theory.claims import CLAIMS

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "results/theory/theory.json"


def test_table_read_figure_11_has_the_recorded_claims() -> None:
    (panel,) = load_figure("or-theorem", ROOT / "conf").panels
    assert panel.file is not None and ROOT / panel.file == RECORDED
    table = Table.read(RECORDED)
    assert [row[0] for row in table.rows] == ["(i)", "(ii)", "(iii)", "P"]
    assert {row[-1] for row in table.rows} == {"holds"} and "make theory" in table.note
    (ratio,) = [str(row[3]) for row in table.rows if row[0] == "(iii)"]
    assert ratio.startswith("0.9999")  # below 1, and not rounded to it


def test_recorded_claims_are_the_current_ones() -> None:
    """A new or changed claim needs a new `make theory`."""
    recorded = [(row["claim"], row["part"], row["statement"]) for row in json.loads(RECORDED.read_text())]
    assert sorted(recorded) == sorted((claim.claim, claim.part, claim.statement) for claim in CLAIMS)
    assert all((RECORDED.parent / f"{word}.png").exists() for word in {word for word, *_ in recorded} - {"table1"})


@pytest.mark.parametrize("text", ["", "[]", '[{"claim": "or"}]'])
def test_table_read_file_without_claims_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "theory.json").write_text(text)
    with pytest.raises(ValueError, match=r"theory\.json"):
        Table.read(tmp_path / "theory.json")
