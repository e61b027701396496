"""Parallel runs as child processes, started from any thread."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console

from lightning_sv.runs.job import Job
from lightning_sv.runs.launch import _stops_as_interrupt, run_jobs


def test_run_jobs_in_a_thread_returns_reasons_of_failures(tmp_path: Path) -> None:
    """A notebook or a server may call `compare` from a thread, in which Python installs no signal handler."""
    jobs = [Job(name, ("sh", "-c"), ("exit 3",), tmp_path / name) for name in ("a", "b")]
    with ThreadPoolExecutor() as pool:
        failed = pool.submit(run_jobs, jobs, parallel=2, console=Console(quiet=True)).result()
    assert failed.keys() == {"a", "b"} and all("exit code 3" in why for why in failed.values())


def test_run_jobs_stop_on_sighup_unless_it_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt), _stops_as_interrupt():
            os.kill(os.getpid(), signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # under nohup
        with _stops_as_interrupt():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
