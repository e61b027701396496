"""The shared runs of one budget: where they lie, which are missing, which diverged."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lightning_sv.experiments.experiment import PlannedPanel
from lightning_sv.experiments.recipe import Recipe
from lightning_sv.lit.nonfinite import FILENAME
from lightning_sv.runs.events import read_summary
from lightning_sv.runs.job import Job
from lightning_sv.runs.launch import LAUNCHER

Wanted = Sequence[tuple[Recipe, int]]


@dataclass(frozen=True)
class Runs:
    """The shared runs of one budget.

    Args:
        out: Their folder's parent.
        context: What else decides the results (corpus, versions); finished runs of another are refused. None where
            nothing is to be trained: what is there is read.
        launcher: The program that trains one run.
    """

    out: Path
    context: Mapping[str, str] | None = field(default_factory=dict)
    launcher: Sequence[str] = LAUNCHER

    def dir(self, recipe: Recipe, seed: int) -> Path:
        """Directory of one run."""
        return self.out / "runs" / recipe.key(seed)

    def job(self, recipe: Recipe, seed: int) -> Job:
        """The run as a child process."""
        title = f"{recipe.model}, {recipe.strategy}, {recipe.details}, {recipe.steps:,} steps, seed {seed}"
        args = (*recipe.args, "--seed_everything", str(seed))
        key, context = recipe.key(seed), self.context or {}
        return Job(key, title, tuple(self.launcher), args, self.dir(recipe, seed), context, addressed=True)

    def missing(self, wanted: Wanted) -> list[Job]:
        """Those that are not complete.

        Raises:
            ValueError: A directory holds a finished run of another command, corpus or version.
        """
        jobs = [self.job(*run) for run in wanted]
        if self.context is None:
            return [job for job in jobs if not (job.run_dir / "summary.json").is_file()]
        return [job for job in jobs if job.state() != "complete"]

    def loss(self, recipe: Recipe, seed: int) -> float | None:
        """Loss of a finished run, nats per token; None where it is not finished.

        Raises:
            ValueError: Its summary is damaged.
        """
        path = self.dir(recipe, seed) / "summary.json"
        found = (summary := read_summary(path)).get("val_loss")
        if summary and not isinstance(found, float):
            raise ValueError(f"{path} has no val_loss; remove {path.parent} and train it again.")
        return found


def diverged(job: Job) -> bool:
    """Whether the run stopped at a loss or gradient that was not finite: resumed, it would do so again."""
    return (job.run_dir / FILENAME).is_file() and not (job.run_dir / "summary.json").is_file()


def without_diverged(panel: PlannedPanel, runs: Runs) -> PlannedPanel:
    """A grid without the values at which a run diverged: they are not the best ones. Other panels as they are."""
    if panel.spec.kind != "grid":
        return panel
    gone = {arm.label: sum(diverged(runs.job(*run)) for run in arm.runs) for arm in panel.arms}
    gone = {label: n for label, n in gone.items() if n}
    if not gone:
        return panel
    series = []
    for each in panel.series:
        kept = [(v, arm) for v, arm in zip(each["values"], each["arms"], strict=True) if arm not in gone]
        if not kept:
            return replace(panel, arms=(), series=(), why_not=f"{each['label']} diverged at every value")
        series.append(each | {"values": [v for v, _ in kept], "arms": [arm for _, arm in kept]})
    arms = tuple(arm for arm in panel.arms if arm.label not in gone)
    words = (f"{panel.spec.title}: {label} diverged in {n} of its runs and is left out." for label, n in gone.items())
    return replace(panel, arms=arms, series=tuple(series), warnings=(*panel.warnings, *words))
