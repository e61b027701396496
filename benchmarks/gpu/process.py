"""Functions in separate processes, with incremental results and deadlines.

    python -m benchmarks.gpu.process benchmarks.gpu.stages.ceilings:run RESULT.json '{"device":
    "cuda", ...}'

The function takes a `Task` and calls `task.save` with intermediate results; its return value is
saved last.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
LAST_LINES = 20


@dataclass
class Task:
    """Input of a stage.

    Attributes:
        device: 'cuda' or 'cpu'.
        toy: if True, use toy sizes.
        seconds: time limit, after which the process is killed and saved results are kept.
        work: private folder for files.
        options: options of the function.
        result: file that `save` writes; None to save nothing.
    """

    device: str = "cuda"
    toy: bool = False
    seconds: float = 60.0
    work: str = "."
    options: dict[str, Any] = field(default_factory=dict)
    result: str | None = None
    began: float = field(default_factory=time.monotonic)

    def save(self, figures: dict[str, Any]) -> None:
        """Write intermediate results atomically."""
        if self.result is not None:
            write_json(Path(self.result), figures)

    @property
    def left(self) -> float:
        """Return the seconds until the deadline."""
        return self.began + self.seconds - time.monotonic()


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON to `path`, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    partial.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of `path`; empty if it is missing or unreadable."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def python_path() -> str:
    """Return the PYTHONPATH of a process that imports this repository."""
    path = [str(ROOT)]
    inherited = os.environ.get("PYTHONPATH")
    if inherited:
        path.append(inherited)
    return os.pathsep.join(path)


class Running:
    """A function in a separate process with a deadline.

    Args:
        target: 'module:function'.
        task: its input; `result` is set here.
        name: name of its files in task.work.
        env: additional environment variables.
        leads: if True, its child processes end with it; otherwise it ends with its parent.
    """

    def __init__(
        self,
        target: str,
        task: Task,
        name: str,
        env: dict[str, str] | None = None,
        *,
        leads: bool = True,
    ):
        self.leads = leads
        self.name = name
        self.began = time.monotonic()
        self.deadline = self.began + task.seconds
        folder = Path(task.work)
        folder.mkdir(parents=True, exist_ok=True)
        self.result = folder / f"{name}.json"
        self.log = folder / f"{name}.log"
        self.result.unlink(missing_ok=True)
        given = {key: getattr(task, key) for key in ("device", "toy", "seconds", "work", "options")}
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu.process",
            target,
            str(self.result),
            json.dumps(given),
        ]
        own = {"PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1"}
        environment = os.environ | own | (env or {})
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=log,
                process_group=0 if leads else None,
            )

    def over(self) -> bool:
        """Return True if it has ended; kill it after its deadline."""
        if self.process.poll() is not None:
            return True
        if time.monotonic() < self.deadline:
            return False
        self.end()
        return True

    def end(self) -> None:
        """Kill it and its child processes."""
        with suppress(ProcessLookupError):
            if self.leads:
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()
        self.process.wait()

    def outcome(self) -> dict[str, Any]:
        """Return state (running, done, failed, deadline), seconds, results, and end of a failure."""
        state = self._state()
        seconds = round(time.monotonic() - self.began, 1)
        found = {"state": state, "seconds": seconds, "figures": read_json(self.result)}
        if state in ("failed", "deadline"):
            found["error"] = self._last_lines(state)
        return found

    def _state(self) -> str:
        code = self.process.poll()
        if code is None:
            return "running"
        if code == 0:
            return "done"
        if code == -signal.SIGKILL and time.monotonic() >= self.deadline:
            return "deadline"
        return "failed"

    def _last_lines(self, state: str) -> list[str]:
        """Return the end of the log of a failure, and what ended the process if the log does not tell."""
        log = self.log.read_text(errors="replace") if self.log.exists() else ""
        lines = [line[:400] for line in log.splitlines()[-LAST_LINES:]]
        if state == "deadline":
            return [*lines, "ended at its deadline"]
        return lines or [f"ended with exit status {self.process.returncode}"]


@dataclass(frozen=True)
class Job:
    """One of several functions that run concurrently.

    Attributes:
        name: name of its result and files.
        target: 'module:function'.
        task: its input.
        gib: approximate GPU memory.
    """

    name: str
    target: str
    task: Task
    gib: float = 0.0


def at_once(
    jobs: Iterable[Job], *, most: int, gib: float = float("inf")
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run jobs concurrently and yield (name, outcome) as they end.

    Args:
        jobs: jobs in starting order; time limits start at their task's `began`.
        most: maximum number of processes.
        gib: maximum total memory of running jobs; a single job may use more.
    """
    waiting = list(jobs)
    running = dict[str, tuple[Job, Running]]()
    try:
        while waiting or running:
            for job in list(waiting):
                taken = sum(other.gib for other, _ in running.values())
                fits = not running or taken + job.gib <= gib
                if fits and len(running) < most:
                    waiting.remove(job)
                    running[job.name] = (job, _start(job))
            for name, (_, process) in list(running.items()):
                if process.over():
                    del running[name]
                    yield name, process.outcome()
            time.sleep(0.05)
    finally:
        for _, process in running.values():
            process.end()


def _start(job: Job) -> Running:
    task = replace(job.task, seconds=max(0.0, job.task.left))
    return Running(job.target, task, job.name, leads=False)


def main() -> None:
    """Run the function named on the command line."""
    target, result, given = sys.argv[1:]
    module, _, name = target.partition(":")
    task = Task(**json.loads(given), result=result)
    task.save(getattr(importlib.import_module(module), name)(task))


if __name__ == "__main__":
    main()
