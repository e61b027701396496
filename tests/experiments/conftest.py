"""Figures in the folder of conf/."""

from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """Return a folder like conf/ with one budget, `cpu`, and no figures."""
    (tmp_path / "paper" / "budgets").mkdir(parents=True)
    for folder in ("model", "optim", "schedule", "trainer", "data", "probes", "base.yaml"):
        (tmp_path / folder).symlink_to(ROOT / "conf" / folder)
    (tmp_path / "paper/budgets/cpu.yaml").write_text(
        "summary: s\nlayers: [trainer/cpu, data/stdlib]\nseeds: 2\n"
        "models:\n  dense: {config: tiny, seconds_per_1000_steps: 13}\n"
    )
    return tmp_path
