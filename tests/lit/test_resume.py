"""Resumed runs: longer ones, errors of a user's code, two processes."""

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_sv.__main__ import main
from lightning_sv.experiments.comparability import comparability_warnings
from lightning_sv.lit.checkpoint.compat import check_learning_rate
from lightning_sv.lit.module import PretrainModule
from lightning_sv.optim import ScheduleConfig
from lightning_sv.runs.events import read_run
from tests.conftest import thinned

WSD, COS = ScheduleConfig("wsd", stable_ratio=0.8), ScheduleConfig("cos", warmup_ratio=0.1)


@pytest.mark.parametrize(
    ("schedule", "step", "then", "now", "refused"),
    [
        (COS, 50, 100, 100, False),
        (COS, 50, 100, 150, True),
        (COS, 50, 100, 60, True),
        (COS, 100, 100, 150, True),
        (COS, 5, 100, 101, False),  # in a warm-up of as many steps nothing has been otherwise
        (WSD, 50, 100, 500, False),
        (WSD, 50, 100, 62, False),  # the decay begins now
        (WSD, 50, 100, 60, True),  # it should have begun
        (WSD, 81, 100, 100, False),
        (WSD, 90, 100, 200, True),
        (WSD, 100, 100, 200, True),
        (replace(WSD, stable_ratio=1.0), 100, 100, 200, False),  # constant: never
    ],
)
def test_resume_with_new_length_is_refused_if_the_learning_rate_jumps(
    schedule: ScheduleConfig, step: int, then: int, now: int, refused: bool
) -> None:
    rate = 0.01 * schedule.factor(min(step, then - 1), then)
    checkpoint = {
        "global_step": step,
        "lightning_sv": {"legs": [{"steps": step, "max_steps": then, "seconds": 1.0}]},
        "optimizer_states": [{"param_groups": [{"lr": rate}]}],
    }
    says = pytest.raises(ValueError, match=f"at step {step} of {then} of its {schedule.name} .*max_steps {now} makes")
    with says if refused else nullcontext():
        check_learning_rate(checkpoint, SimpleNamespace(lr=0.01, schedule=schedule), now)


@pytest.mark.parametrize("schedule", thinned(["wsd", "cos"], ["wsd"]))
def test_extended_run_records_its_lengths(
    schedule: str, run_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wsd before its decay continues as the longer run would; a cosine only on request."""
    fit = ["fit", *run_args, "--model.schedule.name", schedule, "--run_dir", str(tmp_path / "run")]
    fit += ["--checkpoint.every_n_steps", "4"]
    with monkeypatch.context() as patch:
        patch.setattr(PretrainModule, "on_train_batch_start", lambda self, *_: stop_after_step(self, 4))
        assert main([*fit, "--trainer.max_steps", "8"]) == 130
    again = [*fit, "--trainer.max_steps", "12", "--ckpt_path", "last"]
    if schedule == "cos":
        assert main(again) == 2
        again.append("--allow_lr_jump")
    assert main(again) == 0
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["steps"] == 12
    assert [(leg["steps"], leg["max_steps"]) for leg in summary["legs"]] == [(4, 8), (8, 12)]
    assert summary["seconds"] == sum(leg["seconds"] for leg in summary["legs"])
    run = read_run(tmp_path / "run")
    assert run.config["trainer"]["max_steps"] == 12 and run.config["allow_lr_jump"] is False
    assert "learning rate is that of no single schedule" in comparability_warnings({"run": run}, ())[0]
    if schedule == "wsd":
        lr = run.curve("lr").values
        assert lr.tolist() == pytest.approx([lr[0] * WSD.factor(step, 12) for step in range(12)])


def stop_after_step(module: PretrainModule, step: int) -> None:
    if module.global_step == step:
        raise KeyboardInterrupt


def test_error_of_user_code_in_a_resumed_run_is_not_a_damaged_checkpoint(
    run_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = ["fit", *run_args, "--run_dir", str(tmp_path / "run"), "--ckpt_path", "last", "--trainer.max_steps"]
    assert main([*fit, "1"]) == 0
    monkeypatch.setattr(PretrainModule, "on_train_batch_start", lambda self, *_: [][0])
    with pytest.raises(IndexError):
        main([*fit, "2", "--allow_lr_jump"])


@pytest.mark.long
def test_two_processes_of_lightnings_launcher_write_one_run(
    run_args: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    two = ["--trainer.devices", "2", "--trainer.strategy", "ddp"]
    process = subprocess.run([sys.executable, "-m", "lightning_sv", "fit", *run_args, *two], timeout=600, check=False)
    assert process.returncode == 0, capfd.readouterr()
    (run,) = (tmp_path / "runs/tiny").iterdir()
    assert read_run(run).curve("train/loss").tokens.tolist() == [128 * step for step in range(1, 13)]
    assert json.loads((run / "summary.json").read_text())["tokens"] == 12 * 128
