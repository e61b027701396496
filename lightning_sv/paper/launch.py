"""Training runs as child processes: a few at a time, watched, stopped together, resumed, reused when done.

A run's directory holds ``command.json``, the command it answers to with a hash of every file that
the command names, so that a second call trains only what is missing, from the last checkpoint on.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

LAUNCHER = (sys.executable, "-m", "lightning_sv", "fit")
_STEP = re.compile(rb"step (\d+)/(\d+)")
_TAIL_LINES = 20
_GRACE_S = 20.0  # a run that is asked to stop ends its step and writes a checkpoint
_SIGNALLED = (128 + signal.SIGTERM, -signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGINT)
_POLL_S = 0.1


@dataclass(frozen=True)
class Job:
    """One training run to be had.

    Args:
        name: Short name, e.g. ``a-seed0``.
        title: What a reader sees, e.g. ``llama, seed 0``.
        launcher: The program, e.g. ``python -m lightning_sv fit``.
        arguments: Everything after it but the run directory.
        run_dir: Where the run writes.
        context: What else decides the result: the corpus, versions. Runs of another are not reused.
        addressed: Whether the directory's name is a hash of the resolved configuration, as which the files then count.
    """

    name: str
    title: str
    launcher: tuple[str, ...]
    arguments: tuple[str, ...]
    run_dir: Path
    context: Mapping[str, str] = field(default_factory=dict)
    addressed: bool = False

    @property
    def command(self) -> list[str]:
        """The full command line: it goes on from the run's checkpoint, or begins where there is none."""
        return [*self.launcher, *self.arguments, *self.here]

    @property
    def here(self) -> list[str]:
        """The arguments that follow from the directory."""
        return ["--run_dir", str(self.run_dir), "--ckpt_path", "last"]

    @property
    def log(self) -> Path:
        """Where stdout and stderr of the run go."""
        return self.run_dir / "train.log"

    def record(self) -> dict[str, Any]:
        """What a finished run is known by: the command without its directory, and file hashes."""
        values = (argument.split("=", 1)[-1] for argument in self.arguments)
        files = {value: _sha256(Path(value)) for value in values if not self.addressed and Path(value).is_file()}
        # the interpreter's path says nothing about the result
        program = ["python" if part == sys.executable else part for part in self.launcher]
        return {"command": [*program, *self.arguments], "files": files, "context": dict(self.context)}

    def prepare(self) -> None:
        """Claim the directory for this command; what another one left unfinished there is removed."""
        if self.state() == "restart":
            shutil.rmtree(self.run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        (self.run_dir / "command.json").write_text(json.dumps(self.record(), indent=2) + "\n")

    def state(self) -> Literal["new", "resume", "restart", "complete"]:
        """Whether the run is complete, absent, or unfinished: by this command, or by another, which begins again.

        Raises:
            ValueError: When the directory holds something that must not be overwritten.
        """
        if not self.run_dir.exists() or not any(self.run_dir.iterdir()):
            return "new"
        record = self.run_dir / "command.json"
        if not record.is_file():
            why = "is not empty and not a run of this comparison (no command.json)"
            raise ValueError(f"{self.run_dir} {why}; choose another output directory.")
        complete = (self.run_dir / "summary.json").is_file()
        try:
            before, now = json.loads(record.read_text()), self.record()
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{record} is not valid JSON ({error}); remove {self.run_dir}.") from error
        if not complete:
            return "resume" if before == now else "restart"
        if not isinstance(before, dict):
            raise ValueError(f"{record} holds no command; remove {self.run_dir}.")
        if before != now:
            change = f"holds a finished run of another command ({_change(before, now)})"
            raise ValueError(f"{self.run_dir} {change}; remove it or choose another output directory.")
        return "complete"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _change(before: dict[str, Any], now: dict[str, Any]) -> str:
    old, new = before.get("command", []), now["command"]
    if old != new:
        gone = [part for part in old if part not in new] or ["the same words in another order"]
        return f"then {' '.join(gone)}; now {' '.join(p for p in new if p not in old) or 'absent'}"
    before_context = before.get("context", {})
    for key, value in now["context"].items():
        if before_context.get(key) != value:
            return f"{key} was {before_context.get(key)}, now {value}"
    changed = [name for name in now["files"] if before["files"].get(name) != now["files"][name]]
    return f"{', '.join(changed) or 'a file it names'} has changed since"


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_parallel() -> int:
    """Runs at a time: one per core, four at most; a single one where there is a GPU to share."""
    return 1 if torch.cuda.is_available() else min(4, available_cores())


def run_jobs(jobs: Sequence[Job], *, parallel: int, console: Console) -> None:
    """Run all jobs in order, ``parallel`` at a time, with a progress bar each.

    A failure or an interrupt stops the other children; finished runs stay for reuse.

    Raises:
        RuntimeError: When a run fails; the message ends with the last lines of its log.
    """
    threads = str(max(1, available_cores() // parallel))
    env = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}
    waiting, running, finished = deque(jobs), list[_Child](), 0
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[steps]}"))
    progress = Progress(*columns, TimeElapsedColumn(), console=console)
    with _terminate_as_interrupt(), progress:
        overall = progress.add_task("all runs", total=float(len(jobs)), steps=f"0/{len(jobs)}")
        try:
            while waiting or running:
                while waiting and len(running) < parallel:
                    running.append(_Child(waiting.popleft(), env, progress))
                for child in list(running):
                    if child.poll():
                        running.remove(child)
                        child.check()
                        finished += 1
                share = sum(child.share for child in running)
                progress.update(overall, completed=finished + share, steps=f"{finished}/{len(jobs)} runs")
                time.sleep(_POLL_S)
        finally:
            # reached with children alive only on an error or an interrupt
            _stop([child.process for child in running])


class _Child:
    """A running job: its process and its bar."""

    def __init__(self, job: Job, env: dict[str, str], progress: Progress) -> None:
        job.prepare()
        self.job, self.progress, self.share, self.start = job, progress, 0.0, time.monotonic()
        self.task: TaskID = progress.add_task(job.title, total=1.0, steps="starting")
        with job.log.open("ab") as log:  # a resumed run goes on in its log
            # a session of its own: Ctrl-C reaches us alone, and stopping it reaches its workers
            self.process = subprocess.Popen(
                job.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )

    def poll(self) -> bool:
        """Read the progress from the log; True once the process has ended."""
        ended = self.process.poll() is not None
        found = _STEP.findall(_end_of(self.job.log))
        if found:
            step, total = (int(number) for number in found[-1])
            self.share = min(1.0, step / max(total, 1))
            self.progress.update(self.task, completed=self.share, steps=f"step {step}/{total}")
        return ended

    def check(self) -> None:
        """Say that the run is done, or raise with the end of its log."""
        code, seconds = self.process.returncode, time.monotonic() - self.start
        self.progress.remove_task(self.task)
        if code == 0 and (self.job.run_dir / "summary.json").is_file():
            self.progress.console.print(f"{self.job.title}: done in {seconds:.0f} s", markup=False)
            return
        if code in _SIGNALLED:
            raise RuntimeError(f"The run of {self.job.title} was stopped by a signal; the same command resumes it.")
        why = f"exit code {code}" if code else "it ended without a summary.json"
        text = _end_of(self.job.log).decode(errors="replace").replace("\r", "\n")
        tail = "\n".join(text.splitlines()[-_TAIL_LINES:])
        raise RuntimeError(f"The run of {self.job.title} failed ({why}); the end of {self.job.log}:\n{tail}")


def _end_of(path: Path, size: int = 8192) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read()


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, sign)
        deadline = time.monotonic() + _GRACE_S
        while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
            time.sleep(_POLL_S / 2)


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM becomes KeyboardInterrupt, so that `timeout` or a scheduler leaves no orphans."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
