"""Runs that a different command starts: their record, command.json, and their processes, from any
thread."""

import errno
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console

from lightning_sv.errors import ConfigError
from lightning_sv.runs.directory import COMMAND
from lightning_sv.runs.job import Job
from lightning_sv.runs.launch import _stops_as_interrupt, run_jobs


def test_prepare_full_disk_leaves_the_record_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, other = (Job("t", ("x",), (), tmp_path / "run", {"corpus": name}) for name in ("a", "b"))
    job.prepare()
    before = (job.run_dir / COMMAND).read_bytes()

    def full(self: Path, text: str, encoding: str | None = None) -> int:
        with self.open("w") as file:
            file.write(text[:5])
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space"):
            job.prepare()
        assert (job.run_dir / COMMAND).read_bytes() == before and job.state() == "resume"
        with pytest.raises(ConfigError, match="corpus"):
            other.prepare()


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000])
def test_prepare_damaged_record_is_refused(text: str, tmp_path: Path) -> None:
    job = Job("t", ("x",), (), tmp_path / "run")
    job.prepare()
    (job.run_dir / COMMAND).write_text(text)
    with pytest.raises(ConfigError, match=COMMAND):
        job.prepare()


def test_run_jobs_in_a_thread_returns_reasons_of_failures(tmp_path: Path) -> None:
    """A notebook or a server may call `compare` from a thread, in which Python installs no signal
    handler."""
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
