"""Runs as one SLURM array: the script as text, and its submission."""

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from lightning_sv.errors import ConfigError, RunError
from lightning_sv.runs.job import Job


def array_script(
    jobs: Sequence[Job], name: str, sbatch: Sequence[str] = (), program: str = ".venv/bin/lightning-sv"
) -> str:
    """The sbatch script that trains one run per task of an array.

    A task that is near its time limit gets SIGUSR1: the run writes a checkpoint and asks to be queued again; the
    same command then goes on from there.

    Args:
        jobs: the runs that are missing
        name: of the array, in the queue
        sbatch: options of one task; one CPU for a day where there are none
        program: what stands for `lightning-sv` on the nodes
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
    lines += ["set -euo pipefail", f"PROGRAM=${{PROGRAM:-{program}}}", "export OMP_NUM_THREADS=1", ""]
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
