"""A requested training run: its command, its directory, and whether it exists already.

The directory's name holds a hash of the resolved configuration: what differs between two runs in words alone, or in a
comment of a file, is one run. Beside it ``command.json`` says what else decides the result, so that a second call
trains only what is missing, from the last checkpoint on.
"""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from lightning_sv.atomic import file_sha256, partial_of, regular, write_atomically
from lightning_sv.errors import ConfigError, RunError
from lightning_sv.runs.directory import COMMAND, LAST, LOCK, LOG, is_complete
from lightning_sv.runs.lock import remove

#: the program of a run, where nothing else is said
LAUNCHER = (sys.executable, "-m", "lightning_sv", "fit")


def program() -> str:
    """Return what a reader types for `lightning-sv`: its path where the shell would not find it, as under make."""
    started = Path(sys.argv[0])
    found = started.name != "lightning-sv" or shutil.which(started.name)
    return "lightning-sv" if found else str(started)


@dataclass(frozen=True)
class Job:
    """One training run to be had.

    Attributes:
        arguments: everything after it but the run directory
        run_dir: where the run writes; its name identifies the configuration
        context: what else decides the result: the corpus, versions; finished runs of another are refused
    """

    title: str
    launcher: tuple[str, ...]
    arguments: tuple[str, ...]
    run_dir: Path
    context: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What identifies the run."""
        return self.run_dir.name

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
        return self.run_dir / LOG

    def record(self) -> dict[str, Any]:
        """The command without its directory, and what else a finished run is known by: own strategies, the context."""
        from lightning_sv.scale.strategy import modules_named  # torch with it: a second, and reading runs needs none

        scales = (value for before, value in pairwise(["", *self.arguments]) if before == "--model.scale")
        files = {
            name: file_sha256(path) for scale in scales for name in modules_named(scale) if (path := _source(name))
        }
        # the interpreter's path says nothing about the result
        program = ["python" if part == sys.executable else part for part in self.launcher]
        return {"command": [*program, *self.arguments], "files": files, "context": dict(self.context)}

    def prepare(self) -> None:
        """Claim the directory for this command; what another one left unfinished there is removed, see `state`.

        Raises:
            ConfigError: the other one still trains there, or the log is no regular file
        """
        if self.state() == "restart":
            remove(self.run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        regular(self.log)
        write_atomically(self.run_dir / COMMAND, json.dumps(self.record(), indent=2) + "\n")

    def state(self) -> Literal["new", "resume", "restart", "complete"]:
        """Whether the run is complete, absent, or unfinished: as it would be now, or otherwise, which begins again.

        Raises:
            ConfigError: the directory holds something that must not be overwritten
        """
        record = self.run_dir / COMMAND
        unfinished = {LOCK, partial_of(record).name}  # what a kill before the record leaves
        if not self.run_dir.exists() or {file.name for file in self.run_dir.iterdir()} <= unfinished:
            return "new"
        if not record.is_file():
            why = f"is not empty and not a run of this comparison (no {COMMAND})"
            raise ConfigError(f"{self.run_dir} {why}; choose another output directory.")
        complete = is_complete(self.run_dir)
        try:
            before = json.loads(record.read_text())
        except (ValueError, RecursionError):
            before = None
        change = _change(before, self.record())
        if change is None:
            return "complete" if complete else "resume"
        if not complete and not (self.run_dir / LAST).parent.is_dir():  # of which days may lie there
            return "restart"
        what = "a finished" if complete else "an unfinished"
        raise ConfigError(
            f"{self.run_dir} holds {what} run of another command ({change}); remove it or choose another output "
            "directory."
        )


def _source(module: str) -> Path | None:
    """The file of a module that a strategy names; None where it has none."""
    try:
        found = find_spec(module)
    except (ImportError, ValueError):
        return None
    return Path(found.origin) if found is not None and found.has_location and found.origin else None


def _change(before: Any, now: dict[str, Any]) -> str | None:
    """What decides the result and is not as the record has it; None where nothing is."""
    if not isinstance(before, dict):
        return f"{COMMAND} is damaged"
    for part, words in (("context", "{} was {}, now {}"), ("files", "{} has changed since")):
        then, here = before.get(part) or {}, now[part]
        for name in {**then, **here}:
            if then.get(name) != here.get(name):
                return words.format(name, then.get(name), here.get(name))
    return None


def array_script(jobs: Sequence[Job], name: str, sbatch: Sequence[str] = ()) -> str:
    """The sbatch script that trains one run per task of an array.

    A task that is near its time limit gets SIGUSR1: the run writes a checkpoint and asks to be queued again; the
    same command then goes on from there.

    Args:
        jobs: the runs that are missing
        name: of the array, in the queue
        sbatch: options of one task; one CPU for a day where there are none
    """
    options = [
        f"--job-name={name}",
        f"--array=0-{len(jobs) - 1}",
        *(sbatch or ["--ntasks=1", "--cpus-per-task=1", "--time=24:00:00"]),
        "--signal=SIGUSR1@120",
        "--requeue",
        "--open-mode=append",
        "--output=slurm-%x-%A_%a.out",
    ]
    lines = ["#!/bin/bash", f"# {len(jobs)} runs of {name}, one a task."]
    lines += [f"#SBATCH {option}" for option in options]
    lines += ["set -euo pipefail", "PROGRAM=${PROGRAM:-.venv/bin/lightning-sv}", "export OMP_NUM_THREADS=1", ""]
    lines += ['case "$SLURM_ARRAY_TASK_ID" in']
    for i, job in enumerate(jobs):
        words = " ".join(shlex.quote(word) for word in [*job.arguments, *job.here])
        lines += [f"# {job.title}", f"{i}) args=({words}) ;;"]
    lines += ['*) echo "no run of this number: $SLURM_ARRAY_TASK_ID" >&2; exit 2 ;;', "esac"]
    srun = 'srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}"'
    lines += [f'exec {srun} "$PROGRAM" fit "${{args[@]}}"', ""]
    return "\n".join(lines)


def submit(script: Path) -> str:
    """Give the script to sbatch; its answer.

    Raises:
        ConfigError: there is no sbatch here
        RunError: it refuses
    """
    try:
        answer = subprocess.run(["sbatch", str(script)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError(
            f"there is no sbatch here; copy {script} to a machine of the cluster and submit it."
        ) from None
    if answer.returncode:
        raise RunError(f"sbatch {script} failed: {answer.stderr.strip()}")
    return answer.stdout.strip()
