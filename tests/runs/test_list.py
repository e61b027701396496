"""`lightning-sv runs`: the listed runs, finished or not, damaged or hostile."""

import json
from pathlib import Path

import pytest

from lightning_sv.__main__ import main

CONFIG = "model: {scale: llama, optim: {lr: null}}\ndata: {corpus: {dir: data/stdlib}}\ntrainer: {max_steps: 70}\n"


def test_runs_command_lists_settings_and_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["runs"]) == 2 and "runs" in capsys.readouterr().err
    for name in ("tiny/a", "tiny/b", "c", "damaged", "tiny/a/checkpoints"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").write_text(CONFIG)
    summary = {"label": "unified\x1b[2J", "lr": 0.006, "steps": 12, "val_loss": 4.60240364074707}
    (tmp_path / "runs/tiny/a/summary.json").write_text(json.dumps(summary))
    (tmp_path / "runs/damaged/summary.json").write_text("{")
    assert main(["runs", "--json"]) == 0
    shown = capsys.readouterr()
    assert "damaged" in shown.err
    shown_label = "unified\N{REPLACEMENT CHARACTER}[2J"
    unfinished, finished = {"strategy": "llama", "lr": None, "steps": 70, "val_loss": None, "complete": False}, {
        "strategy": shown_label, "lr": 0.006, "steps": 12, "val_loss": summary["val_loss"], "complete": True,
    }  # fmt: skip
    rows = [("runs/c", unfinished), ("runs/tiny/a", finished), ("runs/tiny/b", unfinished)]
    assert json.loads(shown.out) == [{"run": name, "data": "stdlib", **row} for name, row in rows]
    assert main(["runs", "runs/tiny"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) == 2 and lines[0].split() == ["runs/tiny/a", "stdlib", shown_label, "0.006", "12", "4.602"]
