"""Train what the figures need and is not there yet, then read the runs and judge every claim.

    out/  runs/<model>-<strategy>-seed<n>-<hash>/ ...  slurm.sh      the runs are shared by all figures

A run that is complete is skipped, one that is not is resumed.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_sv.experiments.checks import (
    check_same_corpus,
    comparability_warnings,
    config_differences,
    validation_differences,
)
from lightning_sv.experiments.claims import not_testable, verdicts
from lightning_sv.experiments.experiment import ArmRuns, PlannedFigure, PlannedPanel, Question, by_seed, question
from lightning_sv.experiments.results import ArmResult, FigureResult, PanelResult, Verdict
from lightning_sv.experiments.runs import Runs, diverged, without_diverged
from lightning_sv.experiments.tables import benchmark_table, throughput_table
from lightning_sv.runs.events import Run, read_run
from lightning_sv.runs.launch import default_parallel, run_jobs


def questions(figures: Sequence[PlannedFigure], runs: Runs) -> dict[str, Question]:
    """What the rules of these figures ask for now, by figure and panel."""
    found = {}
    for figure in figures:
        for panel in (without_diverged(each, runs) for each in figure.panels):
            if panel.spec.rule is not None and panel.arms and (asked := question(panel, runs.loss)):
                found[f"{figure.spec.name}/{panel.spec.title}"] = asked
    return found


def train(figures: Sequence[PlannedFigure], runs: Runs, *, parallel: int | None, console: Console) -> dict[str, str]:
    """Train what is missing; then what the rules ask for in view of it, until they ask for nothing more.

    Returns:
        Key of a run that failed -> why; the others are trained all the same.

    Raises:
        RuntimeError: A run was stopped by a signal.
    """
    failed: dict[str, str] = {}
    wanted = by_seed(run for figure in figures for run in figure.runs())
    while True:
        left = runs.missing(wanted)
        console.print(f"{len(wanted) - len(left)} of {len(wanted)} runs are complete", markup=False)
        missing = [job for job in left if not diverged(job)]
        for job in left:
            if diverged(job):
                console.print(f"{job.title} diverged; remove {job.run_dir} to train it again", markup=False)
        if missing:
            try:
                at_once = min(parallel or default_parallel(), len(missing))
                failed |= run_jobs(missing, parallel=at_once, console=console, keep_going=True)
            except KeyboardInterrupt:
                console.print("Stopped. The same command goes on from here.")
                raise
        asked = [run for each in questions(figures, runs).values() for arm in each.arms for run in arm.runs]
        wanted = by_seed(asked)
        if all(job.name in failed or diverged(job) for job in runs.missing(wanted)):
            return failed


def result(figure: PlannedFigure, runs: Runs, budget: str, command: str) -> FigureResult:
    """Read the runs of a figure and judge its claims.

    Raises:
        ValueError: A run is of another corpus, tokenizer or validation set.
    """
    panels: list[PanelResult] = []
    judged: list[Verdict] = []
    warnings: list[str] = []
    for panel in figure.panels:
        made, said, weak = _judged(panel, runs, budget)
        panels += made
        judged += [replace(verdict, panel=panel.spec.title) for verdict in said]
        warnings += weak
    recipes = [arm.recipe for panel in figure.panels for arm in panel.arms]
    spec = figure.spec
    return FigureResult(
        name=spec.name, title=spec.title, section=spec.section, summary=spec.summary, panels=tuple(panels),
        verdicts=tuple(judged), warnings=tuple(dict.fromkeys(warnings)), command=command,
        tokens_per_param=min((recipe.tokens_per_param for recipe in recipes), default=0.0),
        paper_numbers=tuple(spec.paper.items()),
        paper_tokens_per_param=spec.paper_tokens_per_param,
    )  # fmt: skip


def _judged(panel: PlannedPanel, runs: Runs, budget: str) -> tuple[list[PanelResult], list[Verdict], list[str]]:
    """A panel, and what its rule asked for; verdicts on its claims; what weakens them."""
    panel = without_diverged(panel, runs)
    claims = [claim for claim in panel.spec.claims if budget not in claim.not_at]
    said = [not_testable(claim, claim.not_at[budget]) for claim in panel.spec.claims if budget in claim.not_at]
    arms, left_out = _complete(panel.arms, runs)
    why_not = panel.why_not or (left_out if panel.arms and not arms else None)
    if why_not is not None:
        return [], [*said, *(not_testable(claim, why_not) for claim in claims)], []
    made = [_panel(replace(panel, arms=arms), runs)]
    weak = [*panel.warnings, *_check(panel, arms, made[0])]
    asked = question(panel, runs.loss) if panel.spec.rule is not None else None
    if asked is not None:
        arms, late = _complete(asked.arms, runs)
        left_out = left_out or late
        if arms:
            made.append(_question_panel(panel, replace(asked, arms=arms), runs))
            weak += _check(panel, arms, made[-1])
    if left_out:
        weak.append(f"{panel.spec.title} rests on the seeds of which every run is there: {left_out}.")
    for claim in claims:
        if claim.kind == "decided" and len(made) == 1:
            said.append(not_testable(claim, "its pairs were not trained"))
            continue
        try:
            said += verdicts(claim, made[-1] if claim.kind == "decided" else made[0])
        except ValueError as error:  # hours of runs stand behind the other claims
            said.append(not_testable(claim, str(error).rstrip(".")))
    return made, said, weak


def _complete(arms: Sequence[ArmRuns], runs: Runs) -> tuple[tuple[ArmRuns, ...], str | None]:
    """The arms on the seeds of which all are complete, none without such a seed; what is missing."""
    left = runs.missing([run for arm in arms for run in arm.runs])
    if not left:
        return tuple(arms), None
    lacking = {job.name for job in left}
    seeds = [s for s in arms[0].seeds if not any(arm.recipe.key(s) in lacking for arm in arms)]
    lost = sum(map(diverged, left))
    why = f" ({lost} diverged)" if lost else ""
    what = f"{len(left)} of its runs did not finish{why}, the first being {left[0].title} ({left[0].log})"
    return tuple(replace(arm, seeds=tuple(seeds)) for arm in arms) if seeds else (), what


def _read(arm: ArmRuns, runs: Runs) -> ArmResult:
    read = tuple(read_run(runs.dir(*run)) for run in arm.runs)
    return ArmResult(arm.label, read, arm.ours, arm.baseline)


def _panel(panel: PlannedPanel, runs: Runs) -> PanelResult:
    arms = tuple(_read(arm, runs) for arm in panel.arms)
    extra: dict[str, Any] = {}
    if panel.spec.kind in ("grid", "scaling"):
        extra = {"series": [dict(each) for each in panel.series]}
    if panel.spec.kind == "grid":
        extra["axis"] = panel.spec.axis
    if panel.spec.kind == "table":
        extra = benchmark_table(Path(panel.spec.file)) if panel.spec.file else throughput_table(arms)
    notes = (*([extra.pop("note")] if "note" in extra else []), *trained(panel.arms))
    return PanelResult(panel.spec.title, arms, panel.spec.kind, extra, notes)


def trained(arms: Sequence[ArmRuns]) -> tuple[str, ...]:
    """What a reader must know of the runs: one sentence for all arms that are alike but for their strategy."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for arm in arms:
        recipe = arm.recipe
        budget = f"{recipe.steps:,} steps, {recipe.tokens_per_param:.1f} tokens a parameter, {len(arm.seeds)} seeds"
        alike.setdefault((recipe.model, recipe.details, budget), []).append(arm.label)
    notes = dict.fromkeys(arm.recipe.note for arm in arms if arm.recipe.note)
    return (*(f"{', '.join(what)}: {'; '.join(labels)}." for what, labels in alike.items()), *notes)


def _question_panel(panel: PlannedPanel, asked: Question, runs: Runs) -> PanelResult:
    rule = panel.spec.rule
    assert rule is not None
    arms = tuple(_read(arm, runs) for arm in asked.arms)
    extra = {
        "rule": {
            "margin": rule.margin,
            "pilot": rule.pilot,
            "budget": rule.budget,
            "needed": asked.needed,
            "ends": asked.ends,
        }
    }
    title = f"{panel.spec.title}: each at its own best, other seeds"
    return PanelResult(title, arms, "curves", extra, trained(asked.arms))


def _check(panel: PlannedPanel, planned: Sequence[ArmRuns], made: PanelResult) -> list[str]:
    """Refuse runs without a common unit; warn where configs differ in more than the panel asked for."""
    found: list[str] = []
    sizes = {arm.label: arm.recipe.model for arm in planned} if made.kind == "scaling" else {}
    for size in dict.fromkeys(sizes.values()) or [""]:
        arms = [arm for arm in made.arms if sizes.get(arm.label, "") == size]
        named: dict[str, Run] = {f"{arm.label}, run {i}": run for arm in arms for i, run in enumerate(arm.runs)}
        if not named:
            continue
        check_same_corpus(named)
        asked = [f"--{key}" for arm in panel.spec.arms.values() for key in arm.set]
        asked += [f"--{panel.spec.axis}"] * bool(panel.spec.axis)
        for arm in panel.spec.arms.values():
            asked += ["--trainer.max_steps"] * (arm.longer != 1) + ["--model.optim.lr"] * bool(arm.lr)
            asked += ["--model.backbone", "--model.optim.lr"] * (arm.model is not None)
        text = comparability_warnings(named, config_differences(named, asked))
        longer = any(arm.longer != 1 for arm in panel.spec.arms.values())
        found += [f"{made.title}: {w}" for w in text if not (longer and "end at different tokens" in w)]
    if sizes:
        every = {str(run.dir): run for arm in made.arms for run in arm.runs}
        check_same_corpus(every, validation=False)
        for key, values in validation_differences(every).items():
            several = " and ".join(dict.fromkeys(map(str, values.values())))
            found.append(f"{made.title}: the laws run through sizes with data.{key} {several}.")
    return found
