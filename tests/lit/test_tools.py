"""Tools of Lightning that people add: each works, or is refused in one sentence before the first step."""

import csv
from pathlib import Path

import pytest
from lightning.pytorch import callbacks

from lightning_sv.__main__ import main
from lightning_sv.runs.events import read_run
from lightning_sv.settings.trainer import REFUSED_CALLBACKS
from tests.conftest import Refused

CALLBACKS = callbacks.__name__
#: arguments that a callback needs
INIT = {
    "GradientAccumulationScheduler": ["--trainer.callbacks.scheduling", "{0: 2}"],
    "StochasticWeightAveraging": ["--trainer.callbacks.swa_lrs", "0.01"],
    "ModelPruning": ["--trainer.callbacks.pruning_fn", "l1_unstructured"],
}


def test_logger_profiler_and_callbacks_of_lightning_work(run_args: list[str], tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text(
        f"""
trainer:
  max_steps: 4
  precision: bf16-mixed
  log_every_n_steps: 1
  profiler: simple
  logger: {{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {{save_dir: {tmp_path / "csv"}}}}}
  callbacks:
  - class_path: {CALLBACKS}.ModelCheckpoint
    init_args: {{dirpath: {tmp_path / "best"}, monitor: val/loss, save_top_k: 1, filename: best}}
  - class_path: {CALLBACKS}.LearningRateMonitor
"""
    )
    args = ["--config", str(tmp_path / "more.yaml"), "--run_dir", str(tmp_path / "run")]
    assert main(["fit", *run_args, *args]) == 0
    run = read_run(tmp_path / "run")
    with next((tmp_path / "csv").rglob("metrics.csv")).open() as file:
        rows = [row for row in csv.DictReader(file) if row["train/loss"]]
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4]
    assert [float(row["train/loss"]) for row in rows] == pytest.approx(run.curve("train/loss").values, rel=1e-6)
    assert (tmp_path / "best/best.ckpt").is_file() and (tmp_path / "run/checkpoints/last.ckpt").is_file()
    assert [name for name in run.curves if name.startswith("lr-")]


@pytest.mark.parametrize("name", REFUSED_CALLBACKS)
def test_callback_that_changes_training_is_refused(name: str, run_args: list[str], refused: Refused) -> None:
    error = refused("fit", *run_args, "--trainer.callbacks", f"{CALLBACKS}.{name}", *INIT.get(name, []))
    assert error == f"error: trainer.callbacks: {name} {REFUSED_CALLBACKS[name]}.\n"


def test_early_stopping_warns(run_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stops = ["--trainer.callbacks", f"{CALLBACKS}.EarlyStopping", "--trainer.callbacks.monitor", "val/loss"]
    short = ["--trainer.max_steps", "2", "--trainer.max_time", "00:12:00:00", "--run_dir", str(tmp_path / "run")]
    assert main(["fit", *run_args, *stops, *short]) == 0
    said = capsys.readouterr().err
    assert "warning: trainer.callbacks: EarlyStopping" in said and "warning: trainer.max_time" in said
