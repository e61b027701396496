"""SIGTERM, SIGUSR1 and Ctrl-C: the run ends after the step under way, and goes on as if it had
not."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from lightning_sv import PretrainModule
from lightning_sv.errors import StoppedError
from lightning_sv.lit.signals import HUNG_UP, REQUEUE_ON_SIGTERM, StopSignals, exit_code
from tests.conftest import argv, write_run_args
from tests.faults.conftest import Tally
from tests.faults.test_kill import start_in_a_write
from tests.lit.runs import LAST, differences, finish, load, run_fit, same_curves, start, wait_for

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


def slurm_plugin(argument: str) -> list[str]:
    """Return the words that add Lightning's plugin for SLURM with an argument."""
    path = "lightning.fabric.plugins.environments.SLURMEnvironment"
    plugin = f"{{class_path: {path}, init_args: {{{argument}}}}}"
    return ["--trainer.plugins", f"[{plugin}]"]


KEEP = slurm_plugin("auto_requeue: false")
KEEP_ALARM = slurm_plugin("auto_requeue: false, requeue_signal: SIGALRM")
ALARM = slurm_plugin("requeue_signal: SIGALRM")


@pytest.fixture(scope="module")
def whole(short_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """Arguments of a fit of five steps, and its run."""
    folder = tmp_path_factory.mktemp("signals")
    sizes = argv("--data.global_batch 32 --data.micro_batch 16 --trainer.max_steps 5")
    args = [*write_run_args(short_corpus, folder), *sizes]
    assert run_fit(args, folder / "whole") == 0
    return args, folder / "whole"


def counted(*row: object) -> object:
    """A row that `make test-faults` counts, and `make test` leaves out."""
    return pytest.param(*row, marks=pytest.mark.faults)


@pytest.mark.parametrize(
    ("numbers", "environment", "plugin", "requeued"),
    [
        counted((signal.SIGTERM,), {}, [], None),
        counted((signal.SIGTERM,), SRUN, [], None),
        counted((signal.SIGTERM,), PREEMPTED, [], "12"),
        counted((signal.SIGUSR1,), BATCH, [], "12"),
        counted((signal.SIGUSR1,), SRUN, [], "12"),
        counted((signal.SIGUSR1,), ARRAY, [], "12_3"),
        ((signal.SIGUSR1,), SRUN, KEEP, None),
        ((signal.SIGALRM,), SRUN, KEEP_ALARM, None),
        ((signal.SIGALRM,), SRUN, ALARM, "12"),
        ((signal.SIGUSR1,), SRUN, ALARM, None),
        ((signal.SIGTERM,), SRUN, ALARM, None),
        ((signal.SIGUSR1, signal.SIGTERM), SRUN, [], "12"),
    ],
)
def test_fit_signalled_stops_or_requeues_and_resumes_exactly(
    numbers: tuple[int, ...], environment: dict[str, str], plugin: list[str], requeued: str | None,
    whole: tuple[list[str], Path], tmp_path: Path, scontrol: Path, tally: Tally,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    args, uninterrupted = whole
    run = tmp_path / "run"

    def send(self: PretrainModule, batch: object, batch_idx: int) -> None:
        if self.global_step == 1:
            for number in numbers:
                os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(PretrainModule, "on_train_batch_start", send)
        assert run_fit([*args, *plugin], run) == (STOPPED if requeued is None else 0)
    assert load(run)["global_step"] == 2
    calls = scontrol.read_text() if scontrol.exists() else ""
    assert calls == ("" if requeued is None else f"requeue {requeued}\n")
    assert run_fit([*args, "--ckpt_path", "last"], run) == 0
    different = differences(load(uninterrupted), load(run))
    effect = "to a process" if requeued is None else "requeued by SLURM"
    names = " and ".join(signal.Signals(number).name for number in numbers)
    tally(f"{names}, {effect}", not different, different)
    same_curves(uninterrupted, run)


@pytest.mark.parametrize(
    ("received", "code"),
    [({signal.SIGUSR1, signal.SIGINT}, INTERRUPTED), ({signal.SIGTERM, signal.SIGHUP}, HUNG_UP)],
    ids=["Ctrl-C", "hang-up"],
)
def test_stop_after_several_signals_is_not_requeued(
    received: set[int], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    signals = StopSignals()
    signals.received = received
    with pytest.raises(StoppedError) as stopped:
        signals.stop(rank_of_two(0))
    assert (stopped.value.code, stopped.value.requeue) == (code, False)


def rank_of_two(rank: int) -> Any:
    """Return the parts of a Trainer that a stop reads, with Lightning's own launcher."""
    strategy = SimpleNamespace(
        cluster_environment=LightningEnvironment(),
        reduce_boolean_decision=lambda decision, all: decision,
    )
    return SimpleNamespace(world_size=2, local_rank=rank, global_step=3, strategy=strategy)


def test_stop_of_a_child_of_lightnings_launcher_does_not_kill_the_first_rank() -> None:
    """The launcher kills it if a child exits with a different code than 0."""
    signals = StopSignals()
    signals.received = {signal.SIGTERM}
    codes = []
    for rank in range(2):
        with pytest.raises(StoppedError) as stopped:
            signals.stop(rank_of_two(rank))
        codes.append(exit_code(stopped.value))
    assert codes == [STOPPED, 0]


@pytest.mark.faults
def test_fit_closed_terminal_stops_with_a_checkpoint(args: list[str], tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    run = tmp_path / "run"
    args = [*args, "--trainer.max_steps", "100000"]
    process = start(args, run, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    while not re.search(rb" [1-9]\d*/100000", shown):  # the bar may skip steps
        shown += os.read(ours, 1024)
    os.close(ours)
    process.send_signal(signal.SIGHUP)
    assert process.wait(120) == HUNG_UP
    assert load(run)["global_step"] >= 1


@pytest.mark.faults
@pytest.mark.parametrize(
    ("number", "exit_code"),
    [
        (signal.SIGTERM, STOPPED),
        (signal.SIGINT, INTERRUPTED),
        (signal.SIGUSR1, STOPPED),
    ],
)
def test_fit_signalled_with_its_workers_stops_and_resumes_exactly(
    number: int, exit_code: int, args: list[str], tmp_path: Path, tally: Tally
) -> None:
    args = [*args, "--data.num_workers", "1"]
    uninterrupted = tmp_path / "whole"
    run = tmp_path / "run"
    assert run_fit(args, uninterrupted) == 0
    process = start(args, run, start_new_session=True)
    wait_for(process, f"step 7/{STEPS}")
    os.killpg(process.pid, number)
    code, output = finish(process)
    assert (code, "Traceback" in output) == (exit_code, False), output
    assert 7 <= load(run)["global_step"] < STEPS
    assert run_fit([*args, "--ckpt_path", "last"], run) == 0
    different = differences(load(uninterrupted), load(run))
    tally(f"{signal.Signals(number).name}, to a process and its workers", not different, different)
    same_curves(uninterrupted, run)


@pytest.mark.faults
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


@pytest.mark.faults
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
