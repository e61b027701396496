"""`lightning-sv theory`: exit codes, JSON, pictures."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.image import imread

from lightning_sv.__main__ import main
from lightning_sv.cli import theory as command
from lightning_sv.theory.claims import CLAIMS, Finding
from lightning_sv.theory.claims.base import Line, Panel
from tests.conftest import Answer, Refused, argv

KEYS = {
    "claim",
    "part",
    "source",
    "statement",
    "conditions",
    "stated",
    "measured",
    "error",
    "verdict",
    "expected",
    "note",
}


@pytest.mark.parametrize(("agrees", "code"), [(True, 0), (False, 1)])
def test_theory_writes_json_and_pictures_and_exits_by_verdict(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    agrees: bool,
    code: int,
) -> None:
    panel = Panel("T", "t", "y", [Line("l", [1, 2], [1, 2])])
    quick = replace(CLAIMS[0], check=lambda: Finding(1.0, 1.0, 0.0, agrees, "a note", (panel,)))
    monkeypatch.setattr(command, "CLAIMS", (quick,))
    assert main([*argv("theory theorem1 --json --out"), str(tmp_path)]) == code
    (row,) = json.loads(capsys.readouterr().out)
    assert set(row) == KEYS and row["verdict"] == ("holds" if agrees else "CONTRADICTED")
    assert json.loads((tmp_path / "theory.json").read_text()) == [row]
    assert imread(tmp_path / "theorem1.png").shape[1] > 500
    assert main(["theory", "--out", str(tmp_path)]) == code
    assert row["verdict"] in capsys.readouterr().out


def test_theory_unwritable_folder_is_refused_before_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.setattr(command, "track", lambda *args, **kwargs: pytest.fail("checked"))
    (tmp_path / "file").write_text("mine")
    assert str(tmp_path / "file") in refused("theory", "--out", str(tmp_path / "file/deep/out"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_theory_wrong_claim_is_refused(refused: Refused) -> None:
    assert "known: theorem1 weight-decay descent hg ap dp or" in refused("theory", "theorem9")


FEW = ["theorem1", "table1"]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(FEW, id="few"),
        pytest.param(
            [name for name in dict.fromkeys(claim.claim for claim in CLAIMS) if name not in FEW],
            id="most",
            marks=pytest.mark.long,
        ),
    ],
)
@pytest.mark.slow
def test_theory_claims_are_as_expected(words: list[str], tmp_path: Path, answer: Answer) -> None:
    rows = answer("theory", *words, "--out", str(tmp_path))
    assert len(rows) == sum(claim.claim in words for claim in CLAIMS)
    assert {row["verdict"] for row in rows} <= {"holds", "fails, as expected"}
    formulas_alone = {"table1", "descent"}
    assert {path.stem for path in tmp_path.glob("*.png")} == set(words) - formulas_alone
