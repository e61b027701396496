"""kill -9 at any time, a dead loader worker, a full disk: the resumed run is the run that nobody
ended, bit for bit.

A limit on the size of files stands for a full disk: the kernel refuses the write that would go
beyond.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests.conftest import argv
from tests.faults.conftest import Tally
from tests.lit.runs import (
    LAST,
    differences,
    finish,
    kill,
    leaving,
    load,
    run_fit,
    same_checkpoint,
    same_curves,
    start,
    wait_for,
)

pytestmark = pytest.mark.faults
KILLS = 20
STEPS = 200
WORKER_STEPS = 300
RESUME = ["--ckpt_path", "last"]


@pytest.fixture
def args(short_args: list[str]) -> list[str]:
    words = (
        f"--trainer.max_steps {STEPS} --checkpoint.every_n_steps 3 --data.validations 20"
        f" --progress.lines {STEPS}"
    )
    return [*short_args, *argv(words)]


def test_fit_killed_at_random_steps_equals_uninterrupted(
    args: list[str], tmp_path: Path, tally: Tally
) -> None:
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    assert run_fit(args, whole) == 0
    draw = random.Random(0)
    saved = 0
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
    assert run_fit([*args, *RESUME], killed) == 0
    same_checkpoint(whole, killed)
    curves = same_curves(whole, killed)
    assert len(curves["train/loss"].tokens) == STEPS // 4
    assert load(whole)["loops"]["fit_loop"]["epoch_progress"]["current"]["started"] > 30


def start_in_a_write(args: list[str], run: Path, fast: int) -> tuple[subprocess.Popen, Path]:
    """Return a fit that has written more than `fast` bytes of its second checkpoint, and the
    file."""
    env = os.environ | {"SLOW_AFTER": str(fast)}
    process = start(args, run, module="tests.faults.slow_writes", env=env)
    partial = run / "checkpoints/.last.ckpt.partial"
    while not ((run / LAST).exists() and partial.exists() and partial.stat().st_size > fast):
        assert process.poll() is None, finish(process)
        time.sleep(0.02)
    return process, partial


def test_fit_killed_in_a_checkpoint_write_resumes_from_the_last(
    args: list[str], tmp_path: Path, tally: Tally
) -> None:
    args = [*args, *argv("--trainer.max_steps 9 --data.validations 2")]
    whole = tmp_path / "whole"
    assert run_fit(args, whole) == 0
    size = (whole / LAST).stat().st_size
    for n, fast in enumerate((0, size // 3, size // 2, size - 9000)):
        run = tmp_path / f"killed{n}"
        process, partial = start_in_a_write(args, run, fast)
        before = (run / LAST).read_bytes()
        kill(process)
        with pytest.raises(RuntimeError):
            torch.load(partial, weights_only=True)
        assert (run / LAST).read_bytes() == before
        assert load(run)["global_step"] == 3
        assert run_fit([*args, *RESUME], run) == 0
        same = differences(load(whole), load(run)) == []
        tally("kill -9 during a checkpoint write", same and not partial.exists())
        same_curves(whole, run)


def test_fit_started_twice_trains_once(args: list[str], tmp_path: Path, tally: Tally) -> None:
    args = [*args, "--trainer.max_steps", "30"]
    processes = [start(args, tmp_path / "run") for _ in range(2)]
    ends = [finish(process) for process in processes]
    tally("two starts at once", sorted(code for code, _ in ends) == [0, 2], ends)
    assert run_fit(args, tmp_path / "whole") == 0
    same_checkpoint(tmp_path / "whole", tmp_path / "run")
    same_curves(tmp_path / "whole", tmp_path / "run")


def test_fit_killed_worker_is_one_error_and_resumes(
    run_args: list[str], tmp_path: Path, tally: Tally
) -> None:
    words = (
        f"--trainer.max_steps {WORKER_STEPS} --data.num_workers 1 --checkpoint.every_n_steps 20"
        f" --progress.lines {WORKER_STEPS}"
    )
    args = [*run_args, *argv(words)]
    whole = tmp_path / "whole"
    run = tmp_path / "run"
    assert run_fit([*args, "--data.num_workers", "0"], whole) == 0
    draw = random.Random(1)
    target = 0
    for _ in range(3):
        target += draw.randint(30, 60)
        process = start([*args, *RESUME], run)
        wait_for(process, f"step {target}/{WORKER_STEPS}")
        (worker,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(worker), signal.SIGKILL)
        code, output = finish(process)
        (error,) = [line for line in output.splitlines() if "error" in line.lower()]
        assert code == 1 and "worker" in error and "Traceback" not in output, output
        target = load(run)["global_step"]
    assert run_fit([*args, *RESUME], run) == 0
    different = differences(load(whole), load(run))
    for _ in range(3):
        tally("a loader worker killed", not different, different)
    same_curves(whole, run)


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.99])
def test_fit_full_disk_keeps_last_checkpoint(
    share: float, run_args: list[str], tmp_path: Path, tally: Tally
) -> None:
    args = [*run_args, "--checkpoint.every_n_steps", "3"]
    whole = tmp_path / "whole"
    run = tmp_path / "run"
    with leaving(run, 3):
        assert run_fit(args, whole) == 0
    checkpoint = run / LAST
    before = checkpoint.read_bytes()
    limit = int(share * checkpoint.stat().st_size)

    def full() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    code, output = finish(start([*args, *RESUME], run, preexec_fn=full))
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    told = code == 1 and len(errors) == 1 and "Traceback" not in output
    told = told and "File too large" in errors[0]
    kept = checkpoint.read_bytes() == before and not list(run.glob("checkpoints/.*"))
    tally("a full disk (limit on file size)", told and kept, output)
    assert run_fit([*args, *RESUME], run) == 0
    assert differences(load(whole), load(run)) == []
