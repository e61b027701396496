"""The log of verdicts: rows are only added, and reports show earlier verdicts."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_sv.cli.paper import run as run_paper
from lightning_sv.experiments.report.verdict_log import add_to_log, log_rows, read_log, with_earlier
from lightning_sv.experiments.results import Figure
from lightning_sv.experiments.spec import budget_names
from tests.experiments.fake_results import disk_full, figure

ROOT = Path(__file__).parents[2]


def moved(to: Figure) -> Figure:
    """Return the claims with a different verdict and estimate of the first."""
    first = replace(to.verdicts[0], verdict="contradicted", estimate=0.1)
    return replace(to, verdicts=(first, *to.verdicts[1:]))


def test_add_to_log_only_new_rows_are_added(tmp_path: Path) -> None:
    """Known rows are not added again, whatever their date; different ones are appended."""
    log, one = tmp_path / "results" / "log.csv", figure()
    assert read_log(log) == [] and add_to_log(log_rows([one], "cpu"), log) == 3  # without the untestable one
    first = log.read_text()
    assert add_to_log([{**row, "date": "2030-01-01"} for row in log_rows([one], "cpu")], log) == 0
    assert log.read_text() == first
    assert add_to_log(log_rows([moved(one)], "cpu"), log) == 1 == add_to_log(log_rows([one], "gpu"), log) - 2
    assert log.read_text().startswith(first)
    rows = read_log(log)
    words = [row["verdict"] for row in rows if row["claim"] == "dp ends below llama"]
    assert words == ["holds", "contradicted", "holds"]
    assert (rows[0]["estimate"], rows[0]["p"], rows[0]["corrected"]) == ("-0.05", "0.003", "not resolved")
    log.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="log.csv"):
        add_to_log(rows, log)


def test_add_to_log_damaged_line_refused_full_disk_keeps_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A truncated line is named; a full disk keeps the file; a missing last line break is accepted."""
    log, one = tmp_path / "log.csv", figure()
    add_to_log(log_rows([one], "cpu"), log)
    text = log.read_text()
    log.write_text(text[: text.rindex(",cpu,") + 20])
    with pytest.raises(ValueError, match=r"log\.csv, line 4\b"):
        add_to_log(log_rows([one], "gpu"), log)
    log.write_text(text.rstrip("\n"))
    with monkeypatch.context() as full:
        full.setattr("os.fsync", disk_full)
        with pytest.raises(OSError, match="No space"):
            add_to_log(log_rows([one], "gpu"), log)
    assert log.read_text() == text.rstrip("\n") and list(tmp_path.iterdir()) == [log]
    assert add_to_log(log_rows([one], "gpu"), log) == 3 and log.read_text().startswith(text)
    assert len(read_log(log)) == 6


def test_with_earlier_changed_verdicts_are_shown(tmp_path: Path) -> None:
    """Those of the same claim and budget, without the current one."""
    log, one = tmp_path / "log.csv", figure()
    other = [{**row, "date": f"2026-01-0{i} 10:00 UTC"} for i, row in enumerate(log_rows([moved(one)], "cpu"), 1)]
    add_to_log(log_rows([one], "cpu"), log)
    add_to_log([*other, *log_rows([one], "gpu")], log)
    (told,) = with_earlier([one], "cpu", read_log(log))
    assert [verdict.earlier for verdict in told.verdicts] == ["contradicted (2026-01-01)", "", "", ""]
    assert with_earlier([told], "cpu", read_log(log))[0].verdicts == told.verdicts


def test_read_log_of_the_repository_has_its_reports() -> None:
    """Each tested verdict of results/*/verdicts.csv is in the log; names of folders begin with their budget."""
    logged = {
        (row["budget"], row["figure"], row["verdict"], row["estimate"]) for row in read_log(ROOT / "results/log.csv")
    }
    for path in sorted(ROOT.glob("results/*/verdicts.csv")):
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if not row["verdict"].startswith("not testable")]
        budget = max((name for name in budget_names() if path.parent.name.startswith(name)), key=len)
        ours = {(budget, row["figure"], row["verdict"], f"{float(row['estimate']):.6g}") for row in rows}
        assert ours and ours <= logged, sorted(ours - logged)


def test_paper_command_invalid_log_refused_first(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    (tmp_path / "results").mkdir()
    (tmp_path / "results/log.csv").write_text("mine\n")
    monkeypatch.chdir(tmp_path)
    words = ["--fig", "heterogeneity", "--data.corpus.dir", str(corpus), "--data.corpus.tokenizer=bpe:300"]
    with pytest.raises(ValueError, match="log.csv"):
        run_paper(words, launcher=("false",))
    assert not (tmp_path / "runs").exists()
