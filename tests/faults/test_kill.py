"""kill -9 at any time: a run resumed as often as it takes is the run that nobody killed, bit for bit."""

from __future__ import annotations

import os
import random
import subprocess
import time
from pathlib import Path

import pytest
import torch

from lightning_sv.__main__ import main
from tests.faults.conftest import Tally
from tests.lit.runs import LAST, differences, finish, kill, load, same_checkpoint, same_curves, start, wait_for

pytestmark = pytest.mark.faults
KILLS, STEPS = 20, 200
RESUME = ["--ckpt_path", "last"]


@pytest.fixture
def args(short_args: list[str]) -> list[str]:
    return [
        *short_args, "--trainer.max_steps", str(STEPS), "--checkpoint.every_n_steps", "3", "--data.validations", "20",
        "--progress.lines", str(STEPS),
    ]  # fmt: skip


def test_run_killed_at_random_steps_equals_uninterrupted(args: list[str], tmp_path: Path, tally: Tally) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main(["fit", *args, "--run_dir", str(whole)]) == 0
    draw, saved = random.Random(0), 0
    for n in range(KILLS):
        process = start([*args, *RESUME], killed)
        target = saved + draw.randint(4, 10)
        wait_for(process, f"step {target}/{STEPS}")
        time.sleep(draw.uniform(0, 0.05))
        kill(process)
        step = load(killed)["global_step"]
        recent = target - 3 <= step < STEPS
        tally("kill -9 at a random step", recent)
        assert recent and not (killed / "summary.json").exists(), n
        saved = step
    assert main(["fit", *args, *RESUME, "--run_dir", str(killed)]) == 0
    same_checkpoint(whole, killed)
    curves = same_curves(whole, killed)
    assert len(curves["train/loss"].tokens) == STEPS // 4
    assert load(whole)["loops"]["fit_loop"]["epoch_progress"]["current"]["started"] > 30


def test_kill_during_a_checkpoint_write_resumes_from_the_one_before(
    args: list[str], tmp_path: Path, tally: Tally
) -> None:
    args = [*args, "--trainer.max_steps", "9", "--checkpoint.every_n_steps", "3", "--data.validations", "2"]
    whole = tmp_path / "whole"
    assert main(["fit", *args, "--run_dir", str(whole)]) == 0
    size = (whole / LAST).stat().st_size
    for n, fast in enumerate((0, size // 3, size // 2, size - 9000)):
        run = tmp_path / f"killed{n}"
        process = start(args, run, module="tests.faults.slow_writes", env=slow(fast))
        partial = run / "checkpoints/.last.ckpt.partial"
        while size_of(partial) <= fast or not (run / LAST).exists():
            assert not ended(process)
            time.sleep(0.02)
        before = (run / LAST).read_bytes()
        kill(process)
        with pytest.raises(RuntimeError):
            torch.load(partial, weights_only=True)
        assert (run / LAST).read_bytes() == before
        assert load(run)["global_step"] == 3
        assert main(["fit", *args, *RESUME, "--run_dir", str(run)]) == 0
        same = differences(load(whole), load(run)) == []
        tally("kill -9 during a checkpoint write", same and not partial.exists())
        assert same and not partial.exists()
        same_curves(whole, run)


def slow(fast: int) -> dict[str, str]:
    return {**os.environ, "SLOW_AFTER": str(fast)}


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def ended(process: subprocess.Popen) -> bool:
    if process.poll() is None:
        return False
    raise AssertionError(process.communicate()[0])


def test_second_run_in_a_directory_is_refused(
    args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_sv.runs.lock.LOCK_SECONDS", 1)
    args = [*args, "--trainer.max_steps", "1500", "--progress.lines", "1500", "--data.validations", "2"]
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert main(["fit", *args, "--run_dir", str(whole)]) == 0
    fit = ["fit", *args, "--run_dir", str(run)]
    first = start(args, run)
    wait_for(first, "step 4/")
    stopped = []
    for second in (["--ckpt_path", "last"], ["--ckpt_path", str(run / LAST)], []):
        capsys.readouterr()
        code = main([*fit, *second])
        error = capsys.readouterr().err
        wanted = "in use by another run" if second else "already holds a run"
        stopped.append(code == 2 and wanted in error and error.count("\n") == 1 and first.poll() is None)
        tally("a second run in the directory", stopped[-1])
    assert all(stopped)
    kill(first)
    assert main([*fit, "--ckpt_path", "last"]) == 0
    same_checkpoint(whole, run)
    same_curves(whole, run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    refused = main(fit) == 2 and {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    tally("a fresh run in a finished directory", refused)
    assert refused


def test_two_starts_at_once_train_once(args: list[str], tmp_path: Path, tally: Tally) -> None:
    args = [*args, "--trainer.max_steps", "30"]
    processes = [start(args, tmp_path / "run") for _ in range(2)]
    ends = [finish(process) for process in processes]
    fine = sorted(code for code, _ in ends) == [0, 2]
    tally("two starts at once", fine)
    assert fine, ends
    assert main(["fit", *args, "--run_dir", str(tmp_path / "whole")]) == 0
    same_checkpoint(tmp_path / "whole", tmp_path / "run")
    same_curves(tmp_path / "whole", tmp_path / "run")
