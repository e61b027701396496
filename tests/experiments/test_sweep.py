"""Sweeps end to end with fake training whose losses are a paraboloid over learning rate and initial
std."""

from pathlib import Path

import pandas as pd
import pytest

from lightning_sv.cli.sweep import run as sweep
from lightning_sv.errors import ConfigError
from tests.conftest import write_run_args
from tests.experiments.test_compare import FAKE

BOWL = ("--best", "0.012", "0.03")
GRID = ["--scale", "llama", "--seeds", "1", "--init_std", "0.02", "0.04", "0.08"]


def test_sweep_finds_the_optimum_and_continues(
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At lr 0.012 and std 0.03, between the points; one more rate only trains its own runs, which
    diverge."""
    launcher = (*FAKE, *BOWL, "--diverge_lr", "0.03")
    args = [*write_run_args(corpus, tmp_path), *GRID, "--out", str(tmp_path / "out")]
    args += ["--model.schedule.name", "wsd", "--lr", "0.005", "0.01", "0.02"]
    assert sweep(args, launcher=launcher) == 0
    assert "4.0000 nats per token (standard error 0.0000)" in capsys.readouterr().out
    runs = pd.read_csv(tmp_path / "out/results.csv")
    assert len(runs) == 9 and runs["val_loss"][0] == pytest.approx(4.0465, rel=1e-3)
    assert "<img" in (tmp_path / "out/report.html").read_text()
    assert not (tmp_path / "out/tuned").exists()

    monkeypatch.setattr("lightning_sv.experiments.compare.write_report", lambda *given: None)
    assert sweep([*args, "0.04"], launcher=launcher) == 0
    said = capsys.readouterr()
    assert "9 of 12 runs are complete" in said.err
    assert "llama at lr 0.012 (times or over 1.00), init_std 0.03 (times" in said.out
    table, _, warnings = said.out.partition("warning: ")
    assert table.count("diverged") == 3 and "diverged" in warnings


@pytest.mark.long
def test_sweep_lowest_at_the_end_no_optimum(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = [*write_run_args(corpus, tmp_path), *GRID[:4], "--out", str(tmp_path / "out")]
    args += ["--lr", "0.004", "0.008"]
    assert sweep(args, launcher=(*FAKE, *BOWL)) == 0
    assert "lr 0.008, its lowest point" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "message"), [
        ([], "--lr"),
        (["--lr", "0.01", "0.01"], r"model\.optim\.lr"),
        (["--lr", "-1", "1"], "learning rate|lr"),
        (["--lr", "0.1", "--seeds", "0"], "--seeds"),
        (["--lr", "0.1", "--jobs", "0"], "--jobs"),
        (["--lr", "0.1", "--model.optim", "{lr: 0.2}"], r"--model\.optim\.lr is 0\.2"),
        (["--init_std", "0.1", "--model.backbone.init_std=0.2"], r"--model\.backbone\.init_std"),
])  # fmt: skip
def test_sweep_wrong_grids_refused(
    words: list[str], message: str, corpus: Path, tmp_path: Path
) -> None:
    args = [*write_run_args(corpus, tmp_path), *GRID[:2], "--out", str(tmp_path / "out")]
    with pytest.raises(ConfigError, match=message):
        sweep([*args, *words], launcher=FAKE)
    assert not (tmp_path / "out").exists()
