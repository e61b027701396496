"""`lightning-sv theory`: exit codes, JSON, pictures, a student and a teacher of one's own."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from lightning_sv.__main__ import main
from lightning_sv.cli import theory as command
from lightning_sv.theory.claims import CLAIMS, Finding
from lightning_sv.theory.panels import Line, Panel
from lightning_sv.theory.students import ScaledInput
from tests.conftest import Refused

KEYS = {
    "claim", "part", "source", "statement", "conditions", "stated", "measured", "error", "verdict", "expected", "note",
}  # fmt: skip


def quick(agrees: bool) -> tuple:
    """The first claim with a check that takes no time."""
    panel = Panel("T", "t", "y", [Line("l", [1, 2], [1, 2])])
    return (replace(CLAIMS[0], check=lambda advance: Finding(1.0, 1.0, 0.0, agrees, "a note", (panel,))),)


@pytest.mark.parametrize(("agrees", "code"), [(True, 0), (False, 1)])
def test_theory_writes_json_and_pictures_and_its_exit_code_tells_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], agrees: bool, code: int
) -> None:
    monkeypatch.setattr(command, "CLAIMS", quick(agrees))
    assert main(["theory", "theorem1", "--json", "--out", str(tmp_path)]) == code
    (row,) = json.loads(capsys.readouterr().out)
    assert set(row) == KEYS and row["verdict"] == ("holds" if agrees else "CONTRADICTED")
    assert json.loads((tmp_path / "theory.json").read_text()) == [row]
    assert imread(tmp_path / "theorem1.png").shape[1] > 500
    assert main(["theory", "--out", str(tmp_path)]) == code
    assert row["verdict"] in capsys.readouterr().out


def test_theory_unwritable_folder_is_refused_before_the_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "check_all", lambda claims: pytest.fail("checked"))
    monkeypatch.setattr(command, "study", lambda *given: pytest.fail("studied"))
    (tmp_path / "file").write_text("mine")
    for words in ([], ["--teacher", "8 1"]):
        assert main(["theory", *words, "--out", str(tmp_path / "file/deep/out")]) == 2
        assert str(tmp_path / "file") in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


class Tanh(ScaledInput):
    """A reparameterization that the derivatives do not cover."""

    name = "tanh"

    def initial_scale(self, d: int) -> list[np.ndarray]:
        return [np.zeros(d)]

    def gamma(self, *scale: object) -> object:
        return 1 + np.tanh(scale[0])  # type: ignore[call-overload]


def test_theory_wrong_words_are_refused(refused: Refused) -> None:
    for words in (["--teacher", "1 2; 3"], ["--teacher", "0"], ["dp", "--teacher", "1"], ["--student", "a:B"]):
        refused("theory", *words)
    refused("theory", "--teacher", "1", "--student", "os:getcwd")
    student = ["--student", "tests.theory.test_command:Tanh"]
    assert "np.tanh is not supported" in refused("theory", "--teacher", "1", *student)
    assert "known: theorem1 weight-decay descent hg ap dp or" in refused("theory", "theorem9")


def test_theory_custom_student_on_custom_teacher_is_exact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """γ = v² doubles γ's speed: P = 4 v² = 4 at the start, and the t³ coefficient is exact."""
    args = ["--teacher", "1 1/2; 0 -1", "--student", "tests.theory.test_series:Squared", "--out", str(tmp_path)]
    assert main(["theory", *args, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["student"]: row for row in found["students"]}
    assert found["teacher"] == [["1", "1/2"], ["0", "-1"]] and len(rows) == 8
    # P = 4 I instead of I: L − L_f = −(2/3)·3·Σ_j ‖w*_j‖⁴ t³ = −2 (1 + 25/16) t³
    assert rows["v²"]["cubic"] == "-41/8" and rows["f, scale vector"]["cubic"] == "0"
    assert (
        rows["v²"]["loss"]["2.0"] < rows["f, scale vector"]["loss"]["2.0"] < rows["g, no scale vector"]["loss"]["2.0"]
    )
    assert imread(tmp_path / "study.png").shape[1] > 1500
    assert main(["theory", *args]) == 0
    assert "-41/8" in capsys.readouterr().out


#: its ten short trainings take as long as all other claims but one
LONG = "init-std"
FEW = ["theorem1", "table1"]


@pytest.mark.parametrize("words", [
    pytest.param(FEW, id="few"),
    pytest.param([name for name in dict.fromkeys(claim.claim for claim in CLAIMS) if name not in (LONG, *FEW)],
                 id="most", marks=pytest.mark.long),
    pytest.param([LONG], marks=pytest.mark.faults),
])  # fmt: skip
@pytest.mark.slow
def test_every_claim_is_as_expected(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["theory", *words, "--json", "--out", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == sum(claim.claim in words for claim in CLAIMS)
    assert {row["verdict"] for row in rows} <= {"holds", "fails, as expected"}
    assert {path.stem for path in tmp_path.glob("*.png")} == set(words) - {"table1"}  # a formula alone
