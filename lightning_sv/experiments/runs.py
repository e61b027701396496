"""The shared runs of one budget: where they lie, which are missing, which diverged."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lightning_sv.errors import ConfigError
from lightning_sv.experiments.results import Arm, Panel
from lightning_sv.experiments.spec import Recipe, Wanted
from lightning_sv.runs.directory import NONFINITE, is_complete
from lightning_sv.runs.events import Run, read_run
from lightning_sv.runs.job import LAUNCHER, Job


@dataclass(frozen=True)
class Runs:
    """The shared runs of one budget.

    Args:
        out: their folder's parent
        context: what else decides the results (corpus, versions); finished runs of another are refused. None where
            nothing is to be trained: what is there is read
        launcher: the program that trains one run
        beside: the same of other budgets; what was trained whole there is not trained again
        recorded: runs by the names of their directories, for those that are not there
    """

    out: Path
    context: Mapping[str, str] | None = field(default_factory=dict)
    launcher: Sequence[str] = LAUNCHER
    beside: Sequence[Path] = ()
    recorded: Mapping[str, Run] = field(default_factory=dict)

    def dir(self, recipe: Recipe, seed: int) -> Path:
        """Directory of one run."""
        return self.job(recipe, seed).run_dir

    def job(self, recipe: Recipe, seed: int) -> Job:
        """The run as a child process."""
        args = (*recipe.args, "--seed_everything", str(seed))
        title, context, name = f"{recipe.title}, seed {seed}", self.context or {}, recipe.key(seed)
        own = Job(title, tuple(self.launcher), args, self.out / "runs" / name, context)
        if own.run_dir.exists():
            return own
        others = (replace(own, run_dir=out / "runs" / name) for out in self.beside)
        return next((job for job in others if self._is_done(job)), own)

    def _is_done(self, job: Job) -> bool:
        """Whether a run of another budget is complete, and of this context."""
        try:
            return is_complete(job.run_dir) and (self.context is None or job.state() == "complete")
        except ConfigError:
            return False

    def is_recorded(self, recipe: Recipe, seed: int) -> bool:
        """Whether a recording stands in for it: its directory, once it is complete, counts more."""
        job = self.job(recipe, seed)
        return job.name in self.recorded and not is_complete(job.run_dir)

    def is_begun(self, recipe: Recipe, seed: int) -> bool:
        """Whether it is there, or a part of it."""
        return self.is_recorded(recipe, seed) or self.dir(recipe, seed).is_dir()

    def missing(self, wanted: Sequence[Wanted]) -> list[Job]:
        """Those that are not complete, and not recorded.

        Raises:
            ConfigError: a directory holds a finished run of another command, corpus or version
        """
        jobs = [self.job(*run) for run in wanted if not self.is_recorded(*run)]
        if self.context is None:
            return [job for job in jobs if not is_complete(job.run_dir)]
        return [job for job in jobs if job.state() != "complete"]

    def read(self, arm: Arm) -> Arm:
        """An arm with all of its runs that are complete, and their seeds.

        Raises:
            ConfigError: a run is damaged
        """
        gone = {job.name for job in self.missing(arm.wanted)}
        there = [(recipe, seed) for recipe, seed in arm.wanted if recipe.key(seed) not in gone]
        runs = tuple(self._read(*run) for run in there)
        return replace(arm, runs=runs, seeds=tuple(seed for _, seed in there))

    def _read(self, recipe: Recipe, seed: int) -> Run:
        """A run that is there, or recorded."""
        directory = self.dir(recipe, seed)
        if not self.is_recorded(recipe, seed):
            return read_run(directory)
        config = {"data": json.loads(recipe.identity)["data"], "seed_everything": seed}
        return replace(self.recorded[directory.name], dir=directory, config=config)

    def complete(self, arms: Sequence[Arm]) -> tuple[tuple[Arm, ...], str | None]:
        """The arms on the seeds of which all are complete, none without such a seed; what is missing."""
        left = self.missing([run for arm in arms for run in arm.wanted])
        if not left:
            return tuple(arms), None
        names = {job.name for job in left}
        lacking = {seed for arm in arms for recipe, seed in arm.wanted if recipe.key(seed) in names}
        seeds = tuple(seed for seed in arms[0].seeds if seed not in lacking)
        lost = sum(map(diverged, left))
        why = f" ({lost} diverged)" if lost else ""
        what = f"{len(left)} of its runs did not finish{why}, the first being {left[0].title} ({left[0].log})"
        return tuple(replace(arm, seeds=seeds) for arm in arms) if seeds else (), what

    def without_diverged(self, panel: Panel) -> Panel:
        """A grid without the values at which a run diverged: they are not the best ones. Other panels as they are."""
        if panel.kind != "grid":
            return panel
        gone = {arm.label: sum(diverged(self.job(*run)) for run in arm.wanted) for arm in panel.arms}
        gone = {label: n for label, n in gone.items() if n}
        series = []
        for each in panel.series:
            kept = [(x, arm) for x, arm in zip(each.points, each.arms, strict=True) if arm not in gone]
            if not kept:
                return replace(panel, arms=(), series=(), why_not=f"{each.label} diverged at every value")
            points, arms = zip(*kept, strict=True)
            series.append(replace(each, points=points, arms=arms))
        words = (f"{panel.title}: {label} diverged in {n} of its runs and is left out." for label, n in gone.items())
        return replace(
            panel,
            arms=tuple(arm for arm in panel.arms if arm.label not in gone),
            series=tuple(series),
            warnings=(*panel.warnings, *words),
        )


def diverged(job: Job) -> bool:
    """Whether the run stopped at a loss or gradient that was not finite: resumed, it would do so again."""
    return (job.run_dir / NONFINITE).is_file() and not is_complete(job.run_dir)
