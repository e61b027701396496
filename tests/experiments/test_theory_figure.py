"""Figure 11 of `make paper`: recorded claims on the theorem of OR from `make theory`."""

import json
from base64 import b64encode
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_sv.experiments.measured_tables import measured_table
from lightning_sv.experiments.report.write import write_report
from lightning_sv.experiments.results import Figure, Panel
from lightning_sv.experiments.sources.from_yaml import load_figure
from lightning_sv.theory.claims import CLAIMS

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "results/theory/theory.json"


def test_figure_11_has_the_recorded_claims() -> None:
    (panel,) = load_figure("or-theorem", ROOT / "conf").panels
    assert panel.file is not None and ROOT / panel.file == RECORDED
    table = measured_table(RECORDED)
    assert [row[0] for row in table.rows] == ["(i)", "(ii)", "(iii)", "P"]
    assert {row[-1] for row in table.rows} == {"holds"} and "make theory" in table.note
    (ratio,) = [str(row[3]) for row in table.rows if row[0] == "(iii)"]
    assert ratio.startswith("0.9999")  # below 1, and not rounded to it


def test_report_shows_the_picture_of_figure_11(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file and in the page; a missing picture has a note."""
    monkeypatch.chdir(ROOT)
    spec = load_figure("or-theorem")
    panel = Panel(spec.panels[0], table=measured_table(RECORDED))
    write_report([Figure(spec, (panel,))], tmp_path, "")
    drawn = (ROOT / "results/theory/or.png").read_bytes()
    assert (tmp_path / "figures/or-theorem-1.png").read_bytes() == drawn
    assert "(figures/or-theorem-1.png)" in (tmp_path / "report.md").read_text()
    assert f"data:image/png;base64,{b64encode(drawn).decode()}" in (tmp_path / "report.html").read_text()
    none = replace(panel, spec=replace(panel.spec, picture="results/none.png"))
    write_report([Figure(spec, (none,))], tmp_path / "without", "")
    assert "results/none.png does not exist" in (tmp_path / "without/report.md").read_text()


def test_recorded_claims_are_the_current_ones() -> None:
    """A new or changed claim needs another `make theory`."""
    recorded = [(row["claim"], row["part"], row["statement"]) for row in json.loads(RECORDED.read_text())]
    assert sorted(recorded) == sorted((claim.claim, claim.part, claim.statement) for claim in CLAIMS)
    assert all((RECORDED.parent / f"{word}.png").exists() for word in {word for word, *_ in recorded} - {"table1"})


@pytest.mark.parametrize("text", ["", "[]", '[{"claim": "or"}]'])
def test_files_without_claims(tmp_path: Path, text: str) -> None:
    (tmp_path / "theory.json").write_text(text)
    with pytest.raises(ValueError, match=r"theory\.json"):
        measured_table(tmp_path / "theory.json")
