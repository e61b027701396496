"""Training runs as parallel child processes with progress bars."""

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_sv.errors import ConfigError, RunError
from lightning_sv.runs.directory import SUMMARY, is_complete
from lightning_sv.runs.job import Job
from lightning_sv.runs.progress import PROGRESS_VARIABLE, read_progress

_TAIL_LINES = 20
_TAIL_BYTES = 8192
_GRACE_S = 20.0  # a stopping run ends its step and writes a checkpoint
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: exit codes of a process that a signal stopped, from a shell and from Popen
_SIGNALLED = {128 + number for number in _STOPPING} | {-number for number in _STOPPING}
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
_POLL_S = 0.1


def default_parallel() -> int:
    """Return the number of parallel runs: one per core, at most four; one if there is a GPU."""
    return 1 if torch.cuda.is_available() else min(4, len(os.sched_getaffinity(0)))


def run_jobs(jobs: Sequence[Job], *, parallel: int, console: Console) -> dict[str, str]:
    """Run all jobs in order, ``parallel`` at a time, with progress bars.

    With several GPUs, each parallel run sees one. An interrupt stops the children; finished runs
    remain.

    Returns:
        name -> reason of each failure

    Raises:
        RunError: a signal stopped a run
    """
    queue = _Queue(jobs, parallel, console)
    with _stops_as_interrupt(), queue.progress:
        try:
            while not queue.is_empty:
                queue.start_waiting()
                queue.collect_ended()
                queue.show()
                time.sleep(_POLL_S)
        finally:
            # children are alive only after an error or an interrupt
            _stop([child.process for child in queue.running])
    return queue.failed


class _Queue:
    """Jobs that wait, run and have failed."""

    def __init__(self, jobs: Sequence[Job], parallel: int, console: Console) -> None:
        self.parallel = parallel
        self.console = console
        self.waiting = deque(jobs)
        self.running: list[_Child] = []
        self.failed: dict[str, str] = {}
        self.n_jobs = len(jobs)
        self.gpus = _gpus()
        bar = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[steps]}"))
        self.progress = Progress(*bar, TimeElapsedColumn(), console=console)
        total = float(self.n_jobs)
        self.overall = self.progress.add_task("all runs", total=total, steps=f"0/{self.n_jobs}")

    @property
    def is_empty(self) -> bool:
        return not self.waiting and not self.running

    def start_waiting(self) -> None:
        """Start jobs until all slots are taken."""
        while self.waiting and len(self.running) < self.parallel:
            job = self.waiting.popleft()
            taken = {child.slot for child in self.running}
            slot = min(set(range(self.parallel)) - taken)
            try:
                self.running.append(_Child(job, slot, self._environment(slot), self.progress))
            except ConfigError as error:  # its directory has a different run
                self._fail(job, str(error))

    def _environment(self, slot: int) -> dict[str, str]:
        """Return the environment of a child: its share of the cores, and one of several GPUs."""
        threads = max(1, len(os.sched_getaffinity(0)) // self.parallel)
        env = {"OMP_NUM_THREADS": str(threads), **os.environ, "PYTHONUNBUFFERED": "1"}
        if self.gpus and self.parallel > 1:
            env["CUDA_VISIBLE_DEVICES"] = self.gpus[slot % len(self.gpus)]
        return env

    def collect_ended(self) -> None:
        """Remove the children that have ended, and note failures."""
        for child in list(self.running):
            if not child.has_ended():
                continue
            self.running.remove(child)
            reason = child.finish()
            if reason:
                self._fail(child.job, reason)

    def _fail(self, job: Job, reason: str) -> None:
        self.failed[job.name] = reason
        self.console.print(reason, markup=False, style="red")

    def show(self) -> None:
        """Update the bar of each run, and that of all runs."""
        for child in self.running:
            child.show()
        finished = self.n_jobs - len(self.waiting) - len(self.running)
        done = finished + sum(child.fraction for child in self.running)
        steps = f"{finished}/{self.n_jobs} runs"
        self.progress.update(self.overall, completed=done, steps=steps)


def _gpus() -> list[str]:
    """Return the names of the GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible:
        return visible.split(",")
    return [str(number) for number in range(torch.cuda.device_count())]


class _Child:
    """A running job: its process, its bar, and the share that is done."""

    def __init__(self, job: Job, slot: int, env: dict[str, str], progress: Progress) -> None:
        job.prepare()
        self.job = job
        self.slot = slot
        self.progress = progress
        self.fraction = 0.0
        self.start = time.monotonic()
        self.task = progress.add_task(job.title, total=1.0, steps="starting")
        with job.log.open("ab") as log:  # a resumed run appends to its log
            self.process = Popen(
                job.command,
                stdin=DEVNULL,
                stdout=log,
                stderr=STDOUT,
                env=env | {PROGRESS_VARIABLE: str(job.progress.absolute())},
                # Ctrl-C reaches only this process, and stopping the session reaches its workers
                start_new_session=True,
            )

    def has_ended(self) -> bool:
        """Return True if the process has ended."""
        return self.process.poll() is not None

    def show(self) -> None:
        """Update the bar by the steps that the run has written."""
        progress = read_progress(self.job.progress)
        if progress is not None:
            self.fraction = progress.fraction
            text = f"step {progress.step}/{progress.total}"
            self.progress.update(self.task, completed=self.fraction, steps=text)

    def finish(self) -> str | None:
        """Remove the bar; print that the run is done, or return the reason of its failure.

        Raises:
            RunError: a signal stopped the run
        """
        self.progress.remove_task(self.task)
        self.job.progress.unlink(missing_ok=True)
        title = self.job.title
        code = self.process.returncode
        if code == 0 and is_complete(self.job.run_dir):
            seconds = time.monotonic() - self.start
            self.progress.console.print(f"{title}: done in {seconds:.0f} s", markup=False)
            return None
        if code in _SIGNALLED:
            hint = "the same command resumes it."
            raise RunError(f"The run of {title} was stopped by a signal; {hint}")
        why = f"exit code {code}" if code else f"it ended without a {SUMMARY}"
        log = self.job.log
        return f"The run of {title} failed ({why}); the end of {log}:\n{_end_of(log)}"


def _end_of(log: Path) -> str:
    """Return the last lines of a log, in which progress bars end a line with a carriage return."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    lines = text.replace("\r", "\n").splitlines()
    return "\n".join(lines[-_TAIL_LINES:])


def _stop(processes: Sequence[Popen[bytes]]) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, sign)
        deadline = time.monotonic() + _GRACE_S
        for process in processes:
            with suppress(TimeoutExpired):
                process.wait(deadline - time.monotonic())


@contextmanager
def _stops_as_interrupt() -> Iterator[None]:
    """Convert a scheduler's signals to KeyboardInterrupt, so that no child survives.

    Only the main thread may do so; in another one nothing changes.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {}
    for number in _ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
