"""Recordings instead of runs, and the recorded claims of `make theory`, a table of figure 11."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
import pytest

from lightning_sv.cli.paper import run as run_paper
from lightning_sv.experiments.evaluate import evaluate
from lightning_sv.experiments.kinds.table import read_table
from lightning_sv.experiments.preflight import check_recorded, check_recorded_curves
from lightning_sv.experiments.report.results_csv import read_recorded, write_csv
from lightning_sv.experiments.report.write import write_report
from lightning_sv.experiments.results import Figure
from lightning_sv.experiments.run_store import RunStore, train
from lightning_sv.experiments.spec import load_figure
from lightning_sv.theory.claims import CLAIMS
from tests.conftest import ROOT
from tests.experiments.test_compare import FAKE
from tests.experiments.test_evaluate import cpu, plan, quiet


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Figure]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        (figure,) = plan("heterogeneity")
        runs = RunStore(tmp_path_factory.mktemp("there"), launcher=FAKE)
        train([figure], runs, parallel=2, console=quiet())
        (found,) = evaluate([figure], runs)
        write_report([found], runs.out / "report", "cpu")
    return runs.out / "report", found


def test_recorded_runs_have_the_same_verdicts(
    trained: tuple[Path, Figure], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report, before = trained
    (figure,) = plan("heterogeneity")
    here = RunStore(tmp_path / "here", None, FAKE, recorded=read_recorded([report]))
    assert here.missing(figure.requests()) == [] and len(here.recorded) == 9
    assert (
        read_recorded([report / "results.csv"]).keys() == here.recorded.keys()
        and not caplog.records
    )
    (found,) = evaluate([figure], here)
    assert [asdict(v) for v in found.verdicts] == [asdict(v) for v in before.verdicts]
    assert found.warnings == before.warnings == ()
    for arm, of in zip(found.panels[0].arms, before.panels[0].arms, strict=True):
        for curve, was in zip(arm.curves, of.curves, strict=True):
            assert (
                curve.tokens.tolist() == was.tokens.tolist()
                and curve.values.tolist() == was.values.tolist()
            )
    write_report([found], here.out / "report", "cpu")
    recorded = (report / "results.csv").read_text()
    assert (here.out / "report/results.csv").read_text() == recorded  # in any folder
    (other := tmp_path / "other.csv").write_text(
        recorded.replace("10000:3", "10000:9").replace(",3.", ",9.")
    )
    first = next(iter(here.recorded))
    assert (
        read_recorded([report, other])[first].val_loss == here.recorded[first].val_loss
        and first in caplog.text
    )


@pytest.mark.parametrize("label", ["=1+1", "@SUM(A1)", "+hg", "'=a", "llama"])
def test_write_csv_label_is_no_formula_and_is_read_again(
    label: str, trained: tuple[Path, Figure], tmp_path: Path
) -> None:
    recorded = pd.read_csv(trained[0] / "results.csv", dtype=str, keep_default_na=False)[:1]
    path = tmp_path / "results.csv"
    write_csv(path, recorded.assign(arm=label))
    assert pd.read_csv(path)["arm"][0][0] not in "=+@"
    (run,) = read_recorded([path]).values()
    assert run.label == label


def test_train_runs_missing_in_a_recording(trained: tuple[Path, Figure], tmp_path: Path) -> None:
    """An existing run has priority over its row; no warning compares its config with recorded
    runs."""
    report, before = trained
    rows = (report / "results.csv").read_text().splitlines(keepends=True)
    (tmp_path / "some").mkdir()
    kept = [row for row in rows if "-hg-seed0" not in row and "-hg-seed1" not in row]
    (tmp_path / "some/results.csv").write_text("".join(kept))
    (figure,) = plan("heterogeneity")
    here = RunStore(
        tmp_path / "here", {}, (*FAKE, "--delta", "1"), recorded=read_recorded([tmp_path / "some"])
    )
    said = quiet()
    train([figure], here, parallel=2, console=said)
    assert "7 of 9 runs are complete, 7 of them as recorded" in said.file.getvalue()  # type: ignore[attr-defined]
    assert len(list((here.out / "runs").iterdir())) == 2
    (found,) = evaluate([figure], here)
    assert [v.n for v in found.verdicts] == [3] and found.warnings == ()
    losses = [
        (a.losses, b.losses)
        for a, b in zip(found.panels[0].arms, before.panels[0].arms, strict=True)
    ]
    assert sum(int((a != b).sum()) for a, b in losses) == 2  # this launcher adds 1 to its losses
    both = replace(here, recorded=read_recorded([report]))
    (again,) = evaluate([figure], both)
    assert [v.estimate for v in again.verdicts] == [v.estimate for v in found.verdicts]


def test_read_recorded_row_without_curve_has_the_final_loss(
    trained: tuple[Path, Figure], tmp_path: Path
) -> None:
    """As in older recordings."""
    report, before = trained
    pd.read_csv(report / "results.csv", dtype=str).assign(curve="").to_csv(
        tmp_path / "results.csv", index=False
    )
    (figure,) = plan("heterogeneity")
    (found,) = evaluate(
        [figure], RunStore(tmp_path, None, FAKE, recorded=read_recorded([tmp_path]))
    )
    assert [v.estimate for v in found.verdicts] == [v.estimate for v in before.verdicts]
    run = found.panels[0].arms[0].runs[0]
    assert len(run.curve("val/loss").tokens) == 1
    with pytest.raises(ValueError, match="'branch_norm/q'"):
        run.curve("branch_norm/q")
    write_report([found], tmp_path / "report", "cpu")  # it is still drawn


@pytest.mark.long
def test_paper_command_takes_recordings(
    trained: tuple[Path, Figure],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report, before = trained
    monkeypatch.setattr("lightning_sv.cli.paper.load_budget", lambda name: cpu())
    words = [
        "--fig",
        "heterogeneity",
        "--out",
        str(tmp_path / "out"),
        "--results_from",
        str(report),
    ]
    assert run_paper([*words, "--no_train"]) == 0
    assert "Holds: hg - shared is -0.030 nats" in " ".join(capsys.readouterr().out.split())
    assert "Holds: hg - shared is -0.030 nats" in before.verdicts[0].sentence
    assert not (tmp_path / "out/runs").exists()
    assert (
        f"--results_from {report} --fig heterogeneity\n" in (tmp_path / "out/report.md").read_text()
    )
    with pytest.raises(ValueError, match="--results_from"):
        run_paper([*words[:-1], str(tmp_path), "--no_train"])


def test_check_recorded_recording_of_another_figure_refused(trained: tuple[Path, Figure]) -> None:
    report, _ = trained
    recorded = read_recorded([report])
    own, other = plan("heterogeneity", "muon")
    check_recorded([own, other], recorded, [report])
    with pytest.raises(ValueError, match="results_from.*muon"):
        check_recorded([other], recorded, [report])


def test_check_recorded_curves_refuses_to_train_without_the_curve_of_a_claim(
    trained: tuple[Path, Figure], tmp_path: Path
) -> None:
    """The claim about half of the tokens needs curves, the one about the end does not."""
    report, _ = trained
    pd.read_csv(report / "results.csv", dtype=str).assign(curve="").to_csv(
        tmp_path / "results.csv", index=False
    )
    (figure,) = plan("heterogeneity")
    (panel,) = figure.panels
    without = RunStore(tmp_path, None, FAKE, recorded=read_recorded([tmp_path]))
    check_recorded_curves([figure], without)
    claims = [replace(claim, until=0.5) for claim in panel.spec.claims]
    early = replace(figure, panels=(replace(panel, spec=replace(panel.spec, claims=claims)),))
    check_recorded_curves([early], replace(without, recorded=read_recorded([report])))
    with pytest.raises(ValueError, match="--results_from.*--fig heterogeneity"):
        check_recorded_curves([early], without)


@pytest.mark.parametrize(("change", "message"), [
    (("c0ffee", "decaf"), r"is decaf; expected c0ffee, the current one"),
    (("7001", ""), "results.csv, line 2"),
    (("10000:", "many:"), r"line 2: it is not a row of a report \(ValueError.*'many'"),
    ((" ", ",,,"), r"line 2: the number of cells differs from the header"),
])  # fmt: skip
def test_read_recorded_invalid_line_is_named(
    trained: tuple[Path, Figure], tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    text = (trained[0] / "results.csv").read_text()
    (tmp_path / "results.csv").write_text(text.replace(*change))
    with pytest.raises(ValueError, match=message):
        read_recorded([tmp_path], "c0ffee")


def test_read_recorded_empty_file_refused(tmp_path: Path) -> None:
    (tmp_path / "results.csv").touch()
    with pytest.raises(ValueError, match="results_from.* run"):
        read_recorded([tmp_path])


RECORDED = ROOT / "results/theory/theory.json"


def test_table_read_figure_11_has_the_recorded_claims() -> None:
    (panel,) = load_figure("or-theorem", ROOT / "conf").panels
    assert panel.file is not None and ROOT / panel.file == RECORDED
    frame, note = read_table(RECORDED)
    assert frame.part.tolist() == ["(i)", "(ii)", "(iii)", "P"]
    assert set(frame.verdict) == {"holds"} and "make theory" in note
    (ratio,) = frame.measured[frame.part == "(iii)"]
    assert ratio.startswith("0.9999")  # below 1, and not rounded to it


def test_recorded_claims_are_the_current_ones() -> None:
    """A new or changed claim needs a new `make theory`."""
    recorded = [
        (row["claim"], row["part"], row["statement"]) for row in json.loads(RECORDED.read_text())
    ]
    assert sorted(recorded) == sorted(
        (claim.claim, claim.part, claim.statement) for claim in CLAIMS
    )
    assert all(
        (RECORDED.parent / f"{word}.png").exists()
        for word in {word for word, *_ in recorded} - {"table1"}
    )


@pytest.mark.parametrize("text", ["", "[]", '[{"claim": "or"}]', "[" * 100_000])
def test_table_read_file_without_claims_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "theory.json").write_text(text)
    with pytest.raises(ValueError, match=r"theory\.json"):
        read_table(tmp_path / "theory.json")
