"""Training runs as parallel child processes with progress bars."""

import os
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_sv.errors import ConfigError, RunError
from lightning_sv.runs.directory import SUMMARY, is_complete
from lightning_sv.runs.job import Job

_STEP = re.compile(rb"step (\d+)/(\d+)")
_TAIL_LINES = 20
_GRACE_S = 20.0  # a stopping run ends its step and writes a checkpoint
_SIGNALLED = {code for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) for code in (128 + number, -number)}
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
_POLL_S = 0.1


def default_parallel() -> int:
    """Return the number of parallel runs: one per core, at most four; one if there is a GPU."""
    return 1 if torch.cuda.is_available() else min(4, len(os.sched_getaffinity(0)))


def run_jobs(jobs: Sequence[Job], *, parallel: int, console: Console) -> dict[str, str]:
    """Run all jobs in order, ``parallel`` at a time, with progress bars; return name -> reason of each failure.

    With several GPUs, each parallel run sees one. An interrupt stops the children; finished runs remain.

    Raises:
        RunError: a signal stopped a run
    """
    failed: dict[str, str] = {}
    threads = str(max(1, len(os.sched_getaffinity(0)) // parallel))
    env = {"OMP_NUM_THREADS": threads, **os.environ, "PYTHONUNBUFFERED": "1"}
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    gpus = named or [str(i) for i in range(torch.cuda.device_count())]
    waiting, running = deque(jobs), list[_Child]()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[steps]}"))
    progress = Progress(*columns, TimeElapsedColumn(), console=console)

    def fail(job: Job, why: str) -> None:
        failed[job.name] = why
        console.print(why, markup=False, style="red")

    with _stops_as_interrupt(), progress:
        overall = progress.add_task("all runs", total=float(len(jobs)), steps=f"0/{len(jobs)}")
        try:
            while waiting or running:
                while waiting and len(running) < parallel:
                    job = waiting.popleft()
                    slot = min(set(range(parallel)) - {child.slot for child in running})
                    own = {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if gpus and parallel > 1 else {}
                    try:
                        running.append(_Child(job, slot, env | own, progress))
                    except ConfigError as error:  # its directory has a different run
                        fail(job, str(error))
                for child in list(running):
                    if child.poll():
                        running.remove(child)
                        if why := child.failure():
                            fail(child.job, why)
                finished = len(jobs) - len(waiting) - len(running)
                done = finished + sum(child.fraction for child in running)
                progress.update(overall, completed=done, steps=f"{finished}/{len(jobs)} runs")
                time.sleep(_POLL_S)
        finally:
            # children are alive only after an error or an interrupt
            _stop([child.process for child in running])
    return failed


class _Child:
    def __init__(self, job: Job, slot: int, env: dict[str, str], progress: Progress) -> None:
        job.prepare()
        self.job, self.slot, self.progress, self.fraction, self.start = job, slot, progress, 0.0, time.monotonic()
        self.task = progress.add_task(job.title, total=1.0, steps="starting")
        with job.log.open("ab") as log:  # a resumed run appends to its log
            # its own session: Ctrl-C reaches only this process, and stopping it reaches its workers
            self.process = Popen(job.command, stdin=DEVNULL, stdout=log, stderr=STDOUT, env=env, start_new_session=True)

    def poll(self) -> bool:
        """Read the progress from the log; return True if the process has ended."""
        ended = self.process.poll() is not None
        found = _STEP.findall(_end_of(self.job.log))
        if found:
            step, total = (int(number) for number in found[-1])
            self.fraction = min(1.0, step / max(total, 1))
            self.progress.update(self.task, completed=self.fraction, steps=f"step {step}/{total}")
        return ended

    def failure(self) -> str | None:
        """Print that the run is done, or return the reason of its failure with the end of its log."""
        code, seconds = self.process.returncode, time.monotonic() - self.start
        self.progress.remove_task(self.task)
        if code == 0 and is_complete(self.job.run_dir):
            self.progress.console.print(f"{self.job.title}: done in {seconds:.0f} s", markup=False)
            return None
        if code in _SIGNALLED:
            raise RunError(f"The run of {self.job.title} was stopped by a signal; the same command resumes it.")
        why = f"exit code {code}" if code else f"it ended without a {SUMMARY}"
        text = _end_of(self.job.log).decode(errors="replace").replace("\r", "\n")
        tail = "\n".join(text.splitlines()[-_TAIL_LINES:])
        return f"The run of {self.job.title} failed ({why}); the end of {self.job.log}:\n{tail}"


def _end_of(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 8192))
        return file.read()


def _stop(processes: Sequence[Popen[bytes]]) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, sign)
        deadline = time.monotonic() + _GRACE_S
        while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
            time.sleep(_POLL_S / 2)


@contextmanager
def _stops_as_interrupt() -> Iterator[None]:
    """Convert a scheduler's signals to KeyboardInterrupt, so that no child survives; only the main thread may do so."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught = [number for number in _ENDING if signal.getsignal(number) != signal.SIG_IGN]
    before = [signal.signal(number, interrupt) for number in caught]
    try:
        yield
    finally:
        for number, handler in zip(caught, before, strict=True):
            signal.signal(number, handler)
