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
        recent = target - 3 <= step < STEPS and not (killed / "summary.json").exists()
        tally("kill -9 at a random step", recent, n)
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
        process = start(args, run, module="tests.faults.slow_writes", env=os.environ | {"SLOW_AFTER": str(fast)})
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
        same_curves(whole, run)


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def ended(process: subprocess.Popen) -> bool:
    if process.poll() is None:
        return False
    raise AssertionError(process.communicate()[0])


def test_two_starts_at_once_train_once(args: list[str], tmp_path: Path, tally: Tally) -> None:
    args = [*args, "--trainer.max_steps", "30"]
    processes = [start(args, tmp_path / "run") for _ in range(2)]
    ends = [finish(process) for process in processes]
    tally("two starts at once", sorted(code for code, _ in ends) == [0, 2], ends)
    assert main(["fit", *args, "--run_dir", str(tmp_path / "whole")]) == 0
    same_checkpoint(tmp_path / "whole", tmp_path / "run")
    same_curves(tmp_path / "whole", tmp_path / "run")
