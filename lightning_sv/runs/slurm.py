"""Requested runs as an array of a SLURM cluster, one per task."""

import shlex
from collections.abc import Sequence

from lightning_sv.runs.job import Job


def array_script(jobs: Sequence[Job], name: str, sbatch: Sequence[str] = ()) -> str:
    """Return an sbatch script with one run per task of an array.

    By default a task has one CPU for a day. A task near its time limit gets SIGUSR1: the run writes
    a checkpoint, is requeued, and resumes.
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
    cases = []
    for i, job in enumerate(jobs):
        arguments = shlex.join([*job.arguments, *job.here])
        cases += [f"# {job.title}", f"{i}) args=({arguments}) ;;"]
    srun = 'srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}"'
    lines = [
        "#!/bin/bash",
        f"# {len(jobs)} runs of {name}, one per task.",
        *(f"#SBATCH {option}" for option in options),
        "set -euo pipefail",
        "PROGRAM=${PROGRAM:-.venv/bin/lightning-sv}",
        "export OMP_NUM_THREADS=1",
        "",
        'case "$SLURM_ARRAY_TASK_ID" in',
        *cases,
        '*) echo "no run of this number: $SLURM_ARRAY_TASK_ID" >&2; exit 2 ;;',
        "esac",
        f'exec {srun} "$PROGRAM" fit "${{args[@]}}"',
        "",
    ]
    return "\n".join(lines)
