"""SIGTERM, SIGUSR1 and Ctrl-C: the run ends after the step under way, and goes on as if it had
not."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_sv.errors import StoppedError
from lightning_sv.lit.signals import REQUEUE_ON_SIGTERM, exit_code
from tests.conftest import argv
from tests.faults.conftest import Tally
from tests.faults.test_kill import start_in_a_write
from tests.lit.runs import LAST, differences, finish, load, run_fit, same_curves, start, wait_for

pytestmark = pytest.mark.faults
STEPS = 30
STOPPED = 128 + signal.SIGTERM
INTERRUPTED = 128 + signal.SIGINT
#: what sbatch gives a job of one task, and what srun adds
BATCH = {"SLURM_JOB_ID": "12", "SLURM_JOB_NAME": "train"}
ONE = dict.fromkeys(["SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES"], "1")
ZERO = dict.fromkeys(["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_ID"], "0")
SRUN = BATCH | ONE | ZERO | {"SLURM_NODELIST": "localhost"}
PREEMPTED = SRUN | {REQUEUE_ON_SIGTERM: "1"}
ARRAY = SRUN | {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.fixture
def args(short_args: list[str]) -> list[str]:
    """A fit with two micro-batches a step, which checkpoints only when asked."""
    words = f"--trainer.max_steps {STEPS} --checkpoint.every_n_steps 10000 --progress.lines {STEPS}"
    return [*short_args, *argv(words)]


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file with the arguments of a scontrol on PATH, which fails if a file `fail` is
    next to it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "scontrol"
    calls = folder / "calls"
    fail = f"[ -e {folder}/fail ] && echo 'slurm_requeue error: not permitted' >&2 && exit 1"
    program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{fail}\nexit 0\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return calls


@pytest.mark.parametrize(
    ("number", "environment", "send", "exit_code", "requeued"),
    [
        (signal.SIGTERM, {}, os.kill, STOPPED, None),
        (signal.SIGTERM, SRUN, os.kill, STOPPED, None),
        (signal.SIGTERM, PREEMPTED, os.kill, 0, "12"),
        (signal.SIGUSR1, BATCH, os.kill, 0, "12"),
        (signal.SIGUSR1, SRUN, os.kill, 0, "12"),
        (signal.SIGUSR1, ARRAY, os.kill, 0, "12_3"),
        (signal.SIGTERM, {}, os.killpg, STOPPED, None),
        (signal.SIGINT, {}, os.killpg, INTERRUPTED, None),
        (signal.SIGUSR1, {}, os.killpg, STOPPED, None),
    ],
)
def test_fit_signalled_stops_or_requeues_and_resumes_exactly(
    number: int, environment: dict[str, str], send: Callable[[int, int], None], exit_code: int,
    requeued: str | None, args: list[str], tmp_path: Path, scontrol: Path, tally: Tally,
) -> None:  # fmt: skip
    """`os.killpg` sends the signal to the loader's worker too."""
    workers = 1 if send is os.killpg else 0
    args = [*args, "--data.num_workers", str(workers)]
    whole = tmp_path / "whole"
    run = tmp_path / "run"
    assert run_fit(args, whole) == 0
    process = start(args, run, env={**os.environ, **environment}, start_new_session=True)
    wait_for(process, f"step 7/{STEPS}")
    send(process.pid, number)
    code, output = finish(process)
    assert (code, "Traceback" in output) == (exit_code, False), output
    assert scontrol.exists() == (requeued is not None)
    if requeued is not None:
        assert scontrol.read_text() == f"requeue {requeued}\n"
    assert 7 <= load(run)["global_step"] < STEPS
    assert run_fit([*args, "--ckpt_path", "last"], run) == 0
    different = differences(load(whole), load(run))
    effect = "to a process" if requeued is None else "requeued by SLURM"
    if workers:
        effect += " and its workers"
    tally(f"{signal.Signals(number).name}, {effect}", not different, different)
    same_curves(whole, run)


def test_fit_second_ctrl_c_ends_at_once(args: list[str], tmp_path: Path, tally: Tally) -> None:
    args = [*args, *argv("--checkpoint.every_n_steps 3 --trainer.max_steps 5000")]
    run = tmp_path / "run"
    process, _ = start_in_a_write(args, run, 9999)
    before = (run / LAST).read_bytes()
    process.send_signal(signal.SIGINT)
    wait_for(process, "Ctrl-C again ends the run at once")
    process.send_signal(signal.SIGINT)
    code, output = finish(process, seconds=10)
    is_kept = (run / LAST).read_bytes() == before and load(run)["global_step"] == 3
    fine = code == -signal.SIGINT and is_kept
    tally("Ctrl-C twice, during a checkpoint write", fine, output)


@pytest.mark.parametrize("broken", ["refuses", "is missing"])
def test_failed_requeue_keeps_the_exit_code(
    broken: str, scontrol: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    if broken == "refuses":
        (scontrol.parent / "fail").touch()
    else:
        monkeypatch.setenv("PATH", str(scontrol.parents[1]))
    code = exit_code(StoppedError(4, STOPPED, requeue=True))
    tally("SIGUSR1, and scontrol fails", code == STOPPED, code)
    assert scontrol.exists() == (broken == "refuses")
