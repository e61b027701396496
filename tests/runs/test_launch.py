"""Parallel runs as child processes, started from any thread."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from lightning_sv.runs.job import Job
from lightning_sv.runs.launch import run_jobs


def test_run_jobs_in_a_thread_returns_the_reason_of_each_failure(tmp_path: Path) -> None:
    """A notebook or a server may call `compare` from a thread, in which Python installs no signal handler."""
    jobs = [Job(name, ("sh", "-c"), ("exit 3",), tmp_path / name) for name in ("a", "b")]
    with ThreadPoolExecutor() as pool:
        failed = pool.submit(run_jobs, jobs, parallel=2, console=Console(quiet=True)).result()
    assert failed.keys() == {"a", "b"} and all("exit code 3" in why for why in failed.values())
