"""A loader worker that dies: one sentence, and the run goes on from its checkpoint."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from lightning_sv.__main__ import main
from tests.faults.conftest import Tally
from tests.lit.runs import differences, finish, load, same_curves, start, wait_for

pytestmark = pytest.mark.faults
STEPS = 300


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_killed_worker_is_one_error_and_the_run_resumes(run_args: list[str], tmp_path: Path, tally: Tally) -> None:
    args = [
        *run_args, "--trainer.max_steps", str(STEPS), "--data.num_workers", "1",
        "--checkpoint.every_n_steps", "20", "--progress.lines", str(STEPS),
    ]  # fmt: skip
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert main(["fit", *args, "--data.num_workers", "0", "--run_dir", str(whole)]) == 0
    draw, target = random.Random(1), 0
    told = []
    for _ in range(3):
        target += draw.randint(30, 60)
        process = start([*args, "--ckpt_path", "last"], run)
        wait_for(process, f"step {target}/{STEPS}")
        (worker,) = children(process.pid)
        os.kill(worker, signal.SIGKILL)
        code, output = finish(process)
        errors = [line for line in output.splitlines() if "error" in line.lower()]
        told.append(code == 1 and len(errors) == 1 and "worker" in errors[0] and "Traceback" not in output)
        assert told[-1], output
        target = load(run)["global_step"]
    assert main(["fit", *args, "--run_dir", str(run), "--ckpt_path", "last"]) == 0
    different = differences(load(whole), load(run))
    for fine in told:
        tally("a loader worker killed", fine and not different, different)
    same_curves(whole, run)
