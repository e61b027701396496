"""Runs of one budget, shared by its figures: out/runs/<model>-<strategy>-seed<n>-<hash>.

Complete runs are skipped, unfinished ones are resumed.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console

from lightning_sv.experiments.results import Figure, Panel, RunRequest, requests_of
from lightning_sv.experiments.run_spec import RunSpec
from lightning_sv.runs.directory import NONFINITE, config_value, is_complete, read_config, read_summary
from lightning_sv.runs.events import Run, read_run
from lightning_sv.runs.job import LAUNCHER, Job
from lightning_sv.runs.launch import default_parallel, run_jobs
from lightning_sv.settings.data import DataConfig
from lightning_sv.version import __version__


@dataclass(frozen=True)
class RunStore:
    """Runs of one budget.

    Attributes:
        out: parent of the folder `runs`
        context: corpus and versions; complete runs with different ones are refused. None accepts all runs, if nothing
            is trained
        recorded: name of a run directory -> run, for directories that do not exist
    """

    out: Path
    context: Mapping[str, str] | None = field(default_factory=dict)
    launcher: Sequence[str] = LAUNCHER
    recorded: Mapping[str, Run] = field(default_factory=dict)

    def dir(self, run_spec: RunSpec, seed: int) -> Path:
        """Return the directory of one run."""
        return self.job(run_spec, seed).run_dir

    def job(self, run_spec: RunSpec, seed: int) -> Job:
        """Return the run as a child process."""
        args = (*run_spec.args, "--seed_everything", str(seed))
        title, run_dir = f"{run_spec.title}, seed {seed}", self.out / "runs" / run_spec.key(seed)
        return Job(title, tuple(self.launcher), args, run_dir, self.context or {})

    def is_recorded(self, run_spec: RunSpec, seed: int) -> bool:
        """Return whether a recording replaces the run, because its directory has no complete run."""
        job = self.job(run_spec, seed)
        return job.name in self.recorded and not is_complete(job.run_dir)

    def missing(self, wanted: Sequence[RunRequest]) -> list[Job]:
        """Return the runs that are neither complete nor recorded."""
        jobs = [self.job(*run) for run in wanted if not self.is_recorded(*run)]
        if self.context is None:
            return [job for job in jobs if not is_complete(job.run_dir)]
        return [job for job in jobs if job.state() != "complete"]

    def read(self, run_spec: RunSpec, seed: int) -> Run:
        """Read a run that is complete or recorded."""
        directory = self.dir(run_spec, seed)
        if not self.is_recorded(run_spec, seed):
            return read_run(directory)
        config = {"data": json.loads(run_spec.identity)["data"], "seed_everything": seed}
        return replace(self.recorded[directory.name], dir=directory, config=config)

    def without_diverged(self, panel: Panel) -> Panel:
        """Return a grid without the points at which a run diverged or ended at NaN; other panels unchanged."""
        if panel.kind != "grid":
            return panel
        lost = {arm.label: n for arm in panel.arms if (n := sum(self._is_left_out(*run) for run in arm.requests))}
        arms = tuple(arm for arm in panel.arms if arm.label not in lost)
        for series in panel.series:
            if not any(arm.series == series.label for arm in arms):
                return replace(panel, arms=(), why_not=f"{series.label} diverged at every value")
        warnings = (f"{panel.title}: {label} diverged in {n} of its runs and is left out." for label, n in lost.items())
        incomplete = frozenset(arm.series for arm in panel.arms if arm.label in lost)
        return replace(panel, arms=arms, warnings=(*panel.warnings, *warnings), diverged=incomplete)

    def _is_left_out(self, run_spec: RunSpec, seed: int) -> bool:
        job = self.job(run_spec, seed)
        if self.is_recorded(run_spec, seed):
            return not math.isfinite(self.recorded[job.name].summary["val_loss"])
        return diverged(job) or (is_complete(job.run_dir) and not math.isfinite(read_summary(job.run_dir)["val_loss"]))


def diverged(job: Job) -> bool:
    """Return whether the run stopped at a loss or gradient that was not finite; resuming it would repeat that."""
    if is_complete(job.run_dir) or not (job.run_dir / NONFINITE).is_file():
        return False
    return bool(config_value(read_config(job.run_dir), "model.nonfinite") != "skip")  # else it was interrupted later


def train(figures: Sequence[Figure], runs: RunStore, *, parallel: int | None, console: Console) -> dict[str, str]:
    """Train missing runs; return key -> reason of each failed run. A diverged run is a result, not a failure.

    Raises:
        RunError: a run was stopped by a signal
        KeyboardInterrupt: the user stopped all runs; complete ones are kept
    """
    requests = requests_of(figures)
    missing = runs.missing(requests)
    recorded = sum(runs.is_recorded(*run) for run in requests)
    where = f", {recorded} of them as recorded" if recorded else ""
    console.print(f"{len(requests) - len(missing)} of {len(requests)} runs are complete{where}", markup=False)
    for job in missing:
        if diverged(job):
            console.print(f"{job.title} diverged; remove {job.run_dir} to train it again", markup=False)
    jobs = [job for job in missing if not diverged(job)]
    if not jobs:
        return {}
    try:
        failed = run_jobs(jobs, parallel=min(parallel or default_parallel(), len(jobs)), console=console)
        return {job.name: failed[job.name] for job in jobs if job.name in failed and not diverged(job)}
    except KeyboardInterrupt:
        console.print("Stopped. Finished runs are kept. The same command reuses them and resumes the others.")
        raise


def context_of(data: DataConfig) -> dict[str, str]:
    """Return corpus and versions, on which results depend in addition to commands, for `RunStore`."""
    return {"corpus_hash": data.manifest.corpus_hash, "torch": torch.__version__, "lightning_sv": __version__}
