"""The shared runs of one budget: their directories, which are missing or diverged; train the missing ones.

    out/  runs/<model>-<strategy>-seed<n>-<hash>/ ...  slurm.sh      the runs are shared by all figures

A run that is complete is skipped, one that is not is resumed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console

from lightning_sv.errors import ConfigError
from lightning_sv.experiments.results import Arm, Figure, Panel, RunRequest, requests_of
from lightning_sv.experiments.run_spec import RunSpec
from lightning_sv.runs.directory import NONFINITE, is_complete
from lightning_sv.runs.events import Run, read_run
from lightning_sv.runs.job import LAUNCHER, Job
from lightning_sv.runs.launch import default_parallel, run_jobs
from lightning_sv.settings.data import DataConfig
from lightning_sv.version import __version__


@dataclass(frozen=True)
class RunStore:
    """The shared runs of one budget.

    Attributes:
        out: their folder's parent
        context: what else decides the results (corpus, versions); finished runs of another are refused. None where
            nothing is to be trained: what is there is read
        beside: the same of other budgets; what was trained whole there is not trained again
        recorded: runs by the names of their directories, for those that are not there
    """

    out: Path
    context: Mapping[str, str] | None = field(default_factory=dict)
    launcher: Sequence[str] = LAUNCHER
    beside: Sequence[Path] = ()
    recorded: Mapping[str, Run] = field(default_factory=dict)

    def dir(self, run_spec: RunSpec, seed: int) -> Path:
        """Directory of one run."""
        return self.job(run_spec, seed).run_dir

    def job(self, run_spec: RunSpec, seed: int) -> Job:
        """The run as a child process."""
        args = (*run_spec.args, "--seed_everything", str(seed))
        title, context, name = f"{run_spec.title}, seed {seed}", self.context or {}, run_spec.key(seed)
        own = Job(title, tuple(self.launcher), args, self.out / "runs" / name, context)
        if own.run_dir.exists():
            return own
        others = (replace(own, run_dir=out / "runs" / name) for out in self.beside)
        return next((job for job in others if self._is_done(job)), own)

    def _is_done(self, job: Job) -> bool:
        """Whether a run of another budget is complete, and of this context."""
        try:
            return is_complete(job.run_dir) and self._is_complete(job)
        except ConfigError:
            return False

    def _is_complete(self, job: Job) -> bool:
        return is_complete(job.run_dir) if self.context is None else job.state() == "complete"

    def is_recorded(self, run_spec: RunSpec, seed: int) -> bool:
        """Whether a recording stands in for it: its directory, once it is complete, counts more."""
        job = self.job(run_spec, seed)
        return job.name in self.recorded and not is_complete(job.run_dir)

    def missing(self, wanted: Sequence[RunRequest]) -> list[Job]:
        """Those that are not complete, and not recorded.

        Raises:
            ConfigError: a directory holds a finished run of another command, corpus or version
        """
        jobs = (self.job(*run) for run in wanted if not self.is_recorded(*run))
        return [job for job in jobs if not self._is_complete(job)]

    def read(self, arm: Arm) -> Arm:
        """Read all runs of an arm that are complete or recorded.

        Raises:
            ConfigError: a run is damaged
        """
        gone = {job.name for job in self.missing(arm.requests)}
        there = {seed: (made, seed) for made, seed in arm.requests if made.key(seed) not in gone}
        return replace(arm, runs=tuple(self._read(*run) for run in there.values()), seeds=tuple(there))

    def _read(self, run_spec: RunSpec, seed: int) -> Run:
        directory = self.dir(run_spec, seed)
        if not self.is_recorded(run_spec, seed):
            return read_run(directory)
        config = {"data": json.loads(run_spec.identity)["data"], "seed_everything": seed}
        return replace(self.recorded[directory.name], dir=directory, config=config)

    def without_diverged(self, panel: Panel) -> Panel:
        """A grid without the values at which a run diverged: they are not the best ones. Other panels as they are."""
        if panel.spec.kind != "grid":
            return panel
        gone = {arm.label: sum(diverged(self.job(*run)) for run in arm.requests) for arm in panel.arms}
        gone = {label: n for label, n in gone.items() if n}
        series = []
        for each in panel.series:
            kept = [(x, arm) for x, arm in zip(each.points, each.arms, strict=True) if arm not in gone]
            if not kept:
                return replace(panel, arms=(), series=(), why_not=f"{each.label} diverged at every value")
            points, arms = zip(*kept, strict=True)
            series.append(replace(each, points=points, arms=arms))
        words = (
            f"{panel.spec.title}: {label} diverged in {n} of its runs and is left out." for label, n in gone.items()
        )
        return replace(
            panel,
            arms=tuple(arm for arm in panel.arms if arm.label not in gone),
            series=tuple(series),
            warnings=(*panel.warnings, *words),
        )


def diverged(job: Job) -> bool:
    """Whether the run stopped at a loss or gradient that was not finite: resumed, it would do so again."""
    return (job.run_dir / NONFINITE).is_file() and not is_complete(job.run_dir)


def train(figures: Sequence[Figure], runs: RunStore, *, parallel: int | None, console: Console) -> dict[str, str]:
    """Train what is missing.

    Returns:
        Key of a run that failed -> why; the others are trained all the same.

    Raises:
        RunError: a run was stopped by a signal
        KeyboardInterrupt: the user stopped them all; finished runs are kept
    """
    wanted = requests_of(figures)
    left = runs.missing(wanted)
    recorded = sum(runs.is_recorded(*run) for run in wanted)
    elsewhere = sum(runs.dir(*run).parent != runs.out / "runs" for run in wanted)
    where = f", {elsewhere} of them under other budgets" if elsewhere else ""
    where += f", {recorded} of them as recorded" if recorded else ""
    console.print(f"{len(wanted) - len(left)} of {len(wanted)} runs are complete{where}", markup=False)
    for job in left:
        if diverged(job):
            console.print(f"{job.title} diverged; remove {job.run_dir} to train it again", markup=False)
    missing = [job for job in left if not diverged(job)]
    if not missing:
        return {}
    try:
        at_once = min(parallel or default_parallel(), len(missing))
        return run_jobs(missing, parallel=at_once, console=console)
    except KeyboardInterrupt:
        console.print("Stopped. Finished runs are kept, the same command reuses them and resumes the others.")
        raise


def context_of(data: DataConfig) -> dict[str, str]:
    """Return what the results of runs depend on beside their commands: of `RunStore`, which refuses to mix them."""
    return {"corpus_hash": data.manifest.corpus_hash, "torch": torch.__version__, "lightning_sv": __version__}
