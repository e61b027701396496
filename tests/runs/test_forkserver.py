"""Runs forked from one warmed process are what `python -m lightning_sv` would have been."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_sv.__main__ import main
from lightning_sv.runs.forkserver import ForkedRun, ForkServer, signal_group

STRATEGY = """
import json, os, signal, sys, time
import torch
print(json.dumps({
    "argv": sys.argv[1:3], "cwd": os.getcwd(), "env": dict(os.environ), "leads": os.getsid(0) == os.getpid(),
    "threads": torch.get_num_threads(), "stdin": sys.stdin.read(),
    "main": sys.modules["__main__"].__spec__.name, "cuda": torch.cuda.is_initialized(),
    "signals": [signal.getsignal(n) in (signal.SIG_DFL, signal.default_int_handler)
                for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP)],
}))
time.sleep(float(os.environ.get("HANG", 0)))
"""


@pytest.fixture(scope="module")
def started() -> Iterator[list[ForkServer]]:
    """The one that is open, where there is one: its imports take seconds."""
    servers: list[ForkServer] = []
    yield servers
    for server in servers:
        server.close()


@pytest.fixture
def server(started: list[ForkServer]) -> ForkServer:
    if not started:
        started.append(ForkServer())
    return started[0]


def wait(process: ForkedRun, seconds: float = 120) -> int:
    deadline = time.monotonic() + seconds
    while process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert process.returncode is not None
    return process.returncode


def until(text: str, log: Path, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not log.is_file() or text not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_has_its_own_session_environment_log_and_modules(
    server: ForkServer, run_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its strategy's module lies in the working directory, and says what it sees when it is imported."""
    (tmp_path / "own_strategy.py").write_text(STRATEGY)
    monkeypatch.chdir(tmp_path)
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "1"}
    log = tmp_path / "train.log"
    log.write_text("before\n")
    run = server.start(["fit", *run_args, "--model.scale", "own_strategy:Absent"], log=log, env=env)
    assert wait(run) == 2
    first, said, *rest = log.read_text().splitlines()
    seen = json.loads(said)
    assert first == "before" and "own_strategy" in rest[-1] and rest[-1].startswith("error: ")
    assert seen["argv"] == ["fit", "--config"] and seen["cwd"] == str(tmp_path)
    assert {key: seen["env"].get(key) for key in env} == env and "PYTORCH_NVML_BASED_CUDA_CHECK" not in seen["env"]
    assert seen["threads"] == 3
    threads = [(task / "comm").read_text().strip() for task in Path(f"/proc/{server.pid}/task").iterdir()]
    assert len(threads) - threads.count("jemalloc_bg_thd") == 1, "a thread was there at the fork"
    assert seen["leads"] and seen["stdin"] == "" and seen["main"] == "lightning_sv.__main__" and not seen["cuda"]
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP)
    # the system's own, but that what is ignored here, as under nohup, is ignored there
    assert seen["signals"] == [signal.getsignal(n) != signal.SIG_IGN for n in numbers]


def test_a_run_trains_as_any_other(
    server: ForkServer, run_args: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    runs = [tmp_path / "warm", tmp_path / "plain"]
    assert wait(server.start(["fit", *run_args, "--run_dir", str(runs[0])], log=tmp_path / "log", env=env)) == 0
    assert main(["fit", *run_args, "--run_dir", str(runs[1])]) == 0
    losses = [json.loads((run / "summary.json").read_text())["val_loss"] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert "step 12/12" in (tmp_path / "log").read_text() and (runs[0] / "run.png").is_file()


def test_signals_reach_a_run_and_its_owner_takes_it_along(
    started: list[ForkServer], server: ForkServer, run_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_strategy.py").write_text(STRATEGY)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HANG": "100", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    logs = [tmp_path / name for name in ("killed", "left")]
    argv = ["fit", *run_args, "--model.scale", "own_strategy:Absent"]
    monkeypatch.chdir(tmp_path)
    killed, left = (server.start(argv, log=log, env=env) for log in logs)
    for log in logs:
        until("leads", log)
    killed.poll()
    signal_group(killed.pid, signal.SIGKILL)
    assert wait(killed) == -signal.SIGKILL and left.poll() is None
    started.remove(server)
    server.close()  # as when the owner has gone: the pipe ends
    deadline = time.monotonic() + 20
    while Path(f"/proc/{left.pid}/stat").is_file() and " Z " not in Path(f"/proc/{left.pid}/stat").read_text():
        assert time.monotonic() < deadline, "an orphan"
        time.sleep(0.02)


def test_an_interrupt_during_the_imports_starts_nothing(tmp_path: Path) -> None:
    server = ForkServer()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            server.start(["--version"], log=tmp_path / "log", env={"OMP_NUM_THREADS": "1"})
    finally:
        signal.signal(signal.SIGALRM, before)
    server.close()
    assert not (tmp_path / "log").exists()


def test_runs_of_a_server_that_is_gone_count_as_killed(tmp_path: Path) -> None:
    server = ForkServer()
    os.kill(server.pid, signal.SIGKILL)
    run = server.start(["--version"], log=tmp_path / "log", env={"OMP_NUM_THREADS": "1"})
    assert run.poll() == -signal.SIGKILL and not (tmp_path / "log").exists()
    server.close()
