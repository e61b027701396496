"""Runs of one budget, shared by its figures: out/runs/<model>-<strategy>-seed<n>-<hash>.

Complete runs are skipped, unfinished ones are resumed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from lightning_sv.atomic import file_sha256, read_json
from lightning_sv.experiments.arms import RunRequest
from lightning_sv.experiments.results import PlannedFigure, requests_of
from lightning_sv.runs.directory import (
    COMMAND,
    SUMMARY_TYPES,
    is_complete,
    is_diverged,
    read_config,
    read_stop,
)
from lightning_sv.runs.events import Curve, Run, read_run
from lightning_sv.runs.job import LAUNCHER, Job
from lightning_sv.runs.launch import default_parallel, run_jobs
from lightning_sv.runs.tags import VAL_LOSS
from lightning_sv.settings.data import DataConfig
from lightning_sv.settings.words import values_of
from lightning_sv.version import __version__


@dataclass(frozen=True)
class RunStore:
    """Runs of one budget.

    Attributes:
        out: parent of the folder `runs`
        context: corpus and versions; complete runs with different ones are refused. None accepts
            all runs, if nothing is trained
        recorded: name of a run directory -> run, for directories that do not exist
    """

    out: Path
    context: Mapping[str, str] | None = field(default_factory=dict)
    launcher: Sequence[str] = LAUNCHER
    recorded: Mapping[str, Run] = field(default_factory=dict)

    def dir(self, request: RunRequest) -> Path:
        """Return the directory of one run."""
        return self.out / "runs" / request.name

    def job(self, request: RunRequest) -> Job:
        """Return the run as a child process."""
        run_spec, seed = request
        args = (*run_spec.args, "--seed_everything", str(seed))
        title = f"{run_spec.title}, seed {seed}"
        configs = {path: file_sha256(Path(path)) for path in values_of(args, "config")}
        return Job(
            title, tuple(self.launcher), args, self.dir(request), self.context or {}, configs
        )

    def is_recorded(self, request: RunRequest) -> bool:
        """Return True if a recording replaces the run, whose directory has no complete run."""
        return request.name in self.recorded and not is_complete(self.dir(request))

    def has_ended(self, request: RunRequest) -> bool:
        """Return True if a run is recorded, or complete or diverged in this context."""
        if self.is_recorded(request):
            return True
        job = self.job(request)
        if self.context is not None:
            job.state()  # refuses a run of a different context
        return is_complete(job.run_dir) or is_diverged(job.run_dir)

    def missing(self, requests: Sequence[RunRequest]) -> list[Job]:
        """Return the runs that have not ended."""
        jobs = []
        for request in requests:
            if not self.has_ended(request):
                jobs.append(self.job(request))
        return jobs

    def read(self, request: RunRequest) -> Run:
        """Read a run that is complete, recorded or diverged.

        The last loss of a diverged run is NaN.
        """
        run_spec, seed = request
        run_dir = self.dir(request)
        if self.is_recorded(request):
            config = {"data": run_spec.settings["data"], "seed_everything": seed}
            return replace(self.recorded[request.name], dir=run_dir, config=config)
        if is_diverged(run_dir):
            return _read_diverged(run_dir, request)
        return read_run(run_dir)


def _read_diverged(run_dir: Path, request: RunRequest) -> Run:
    """Return a diverged run, which has no summary, with a loss of NaN at its last step."""
    run_spec, seed = request
    data = run_spec.settings["data"]
    event = read_stop(run_dir)
    steps = event["step"] + 1  # with the step that failed
    tokens = steps * data["global_batch"] * data["seq_len"]
    command = read_json(run_dir / COMMAND, "train the run again.")
    facts = {**command["context"], **event}
    summary = {key: value for key, value in facts.items() if key in SUMMARY_TYPES}
    summary |= {
        "seed": seed,
        "steps": event["step"],
        "tokens": tokens,
        "val_loss": math.nan,
        "lr": run_spec.settings["model"]["optim"]["lr"],
        "activated_parameters": run_spec.parameters,
    }
    losses = Curve(np.array([tokens]), np.array([math.nan]))
    return Run(run_dir, run_spec.strategy, read_config(run_dir), summary, {VAL_LOSS: losses})


def train_missing(
    figures: Sequence[PlannedFigure],
    runs: RunStore,
    *,
    parallel: int | None,
    console: Console,
) -> dict[str, str]:
    """Train missing runs; return key -> reason of each failed run.

    A diverged run is a result, not a failure.

    Raises:
        RunError: a run was stopped by a signal
        KeyboardInterrupt: the user stopped all runs; complete ones are kept
    """
    requests = requests_of(figures)
    jobs = runs.missing(requests)
    _print_state(requests, len(jobs), runs, console)
    if not jobs:
        return {}
    parallel = min(parallel or default_parallel(), len(jobs))
    try:
        failed = run_jobs(jobs, parallel=parallel, console=console)
    except KeyboardInterrupt:
        hint = "The same command reuses them and resumes the others."
        console.print(f"Stopped. Finished runs are kept. {hint}")
        raise
    failures = {}
    for job in jobs:
        if job.name in failed and not is_diverged(job.run_dir):
            failures[job.name] = failed[job.name]
    return failures


def _print_state(
    requests: Sequence[RunRequest], missing: int, runs: RunStore, console: Console
) -> None:
    """Print the number of complete runs, and the diverged ones."""
    recorded = list(filter(runs.is_recorded, requests))
    state = f"{len(requests) - missing} of {len(requests)} runs are complete"
    if recorded:
        state += f", {len(recorded)} of them as recorded"
    console.print(state, markup=False)
    for request in requests:
        job = runs.job(request)
        if not runs.is_recorded(request) and is_diverged(job.run_dir):
            hint = f"remove {job.run_dir} to train it again"
            console.print(f"{job.title} diverged; {hint}", markup=False)


def context_of(data: DataConfig) -> dict[str, str]:
    """Return corpus and versions, on which results depend in addition to commands."""
    return {
        "corpus_hash": data.manifest.corpus_hash,
        "torch": torch.__version__,
        "lightning_sv": __version__,
    }
