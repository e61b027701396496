"""Train a baseline and other arms on the same seeds, side by side, and compare them in pairs.

    out/  a-seed0/ b-seed0/ c-seed0/ ... a-seed1/ ...  comparison.json  comparison.png  [sharpness.png .csv]

Called again with the same arguments it trains only what is missing; with more seeds or further
arms, only those.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from string import ascii_lowercase

from rich.console import Console

from lightning_sv.analysis.losses import draw_comparison
from lightning_sv.analysis.sharpness import draw_sharpness, has_sharpness, sharpness_rows
from lightning_sv.experiments.checks import (
    check_same_corpus,
    comparability_warnings,
    config_differences,
)
from lightning_sv.experiments.comparison import Comparison
from lightning_sv.experiments.pair import Arm, TrainedArm
from lightning_sv.experiments.report.tables import write_csv
from lightning_sv.runs.events import read_run
from lightning_sv.runs.job import Job
from lightning_sv.runs.launch import LAUNCHER, default_parallel, run_jobs

_OURS = ("--model.scale", "--seed_everything", "--run_dir", "--ckpt_path")


def compare(
    a: Arm,
    others: Sequence[Arm],
    *,
    seeds: Sequence[int],
    args: Sequence[str] = (),
    out: str | Path | None = None,
    jobs: int | None = None,
    console: Console | None = None,
    launcher: Sequence[str] = LAUNCHER,
    confidence: float = 0.95,
    context: Mapping[str, str] | None = None,
) -> Comparison:
    """Run what is missing, check that the runs are comparable, write the JSON and the chart.

    Args:
        a: The arm compared with, usually ``llama``.
        others: The arms in question, each compared with A; A is trained once.
        seeds: One run of every arm per seed; an interval needs two, a useful one three or more.
        args: Arguments of ``fit`` for every arm, ``--config`` first.
        out: Directory of the comparison; ``runs/compare/<A>_vs_<B>_<C>...`` when None.
        jobs: Runs at a time; None: one per core, at most four, a single one on a GPU. The cores
            are shared out evenly among them.
        console: Where progress goes; stderr when None, so that stdout is free for the result.
        launcher: The program that trains one run.
        confidence: Coverage of the intervals.
        context: What else decides the results (corpus, versions); finished runs of another are refused.

    Raises:
        ValueError: For equal labels, arguments this function sets itself, a directory that holds
            other runs, or runs on different corpora or tokenizers.
        RuntimeError: When a run fails; the message ends with the last lines of its log.
    """
    console = console or Console(stderr=True)
    arms = (a, *others)
    _check_request(arms, seeds, args, jobs)
    names = "_".join(_slug(arm.label) for arm in others)
    out = Path("runs/compare", f"{_slug(a.label)}_vs_{names}") if out is None else Path(out)
    plan = _plan(arms, seeds, args, out, tuple(launcher), context or {})
    states = {job.name: job.state() for job in plan}  # may refuse; nothing was touched so far
    reused = frozenset(name for name, state in states.items() if state == "complete")
    for job in plan:
        if job.name in reused:
            console.print(
                f"{job.title}: reused, {job.run_dir} is complete with the same command",
                markup=False,
                highlight=False,
            )
    # what is already there must agree before hours are spent on the rest
    check_same_corpus({job.name: read_run(job.run_dir) for job in plan if job.name in reused})

    missing = [job for job in plan if job.name not in reused]
    if missing:
        parallel = min(jobs or default_parallel(), len(missing))
        try:
            run_jobs(missing, parallel=parallel, console=console)
        except KeyboardInterrupt:
            console.print("Stopped. Finished runs are kept, the same command reuses them and resumes the others.")
            raise

    runs = {job.name: read_run(job.run_dir) for job in plan}
    check_same_corpus(runs)
    trained = [TrainedArm(arm, tuple(runs[_run_name(i, seed)] for seed in seeds)) for i, arm in enumerate(arms)]
    _check_arms_differ(trained)
    differences = config_differences(runs, [argument for arm in arms for argument in arm.args])
    comparison = Comparison(
        a=trained[0],
        others=tuple(trained[1:]),
        seeds=tuple(seeds),
        runs=runs,
        commands={job.name: [*job.record()["command"], *job.here[:2]] for job in plan},
        reused=reused,
        differences=tuple(differences),
        warnings=tuple(comparability_warnings(runs, differences)),
        out=out,
        confidence=confidence,
    )
    (out / "comparison.json").write_text(comparison.to_json() + "\n")
    draw_comparison(
        [arm.runs for arm in trained],
        out / "comparison.png",
        labels=[arm.label for arm in arms],
        confidence=confidence,
    )
    if has_sharpness(list(runs.values())):
        labels = [arm.label for arm in arms]
        draw_sharpness([arm.runs for arm in trained], out / "sharpness.png", labels=labels)
        write_csv(out / "sharpness.csv", sharpness_rows([arm.runs for arm in trained], labels))
    return comparison


def _check_request(arms: Sequence[Arm], seeds: Sequence[int], args: Sequence[str], jobs: int | None) -> None:
    if not 2 <= len(arms) <= len(ascii_lowercase):
        raise ValueError(
            f"There are {len(arms) - 1} strategies to compare with {arms[0].label!r}; "
            f"give 1 to {len(ascii_lowercase) - 1}."
        )
    for (i, first), (j, second) in combinations(enumerate(arms), 2):
        if first.label == second.label:
            raise ValueError(
                f"Arms {ascii_lowercase[i].upper()} and {ascii_lowercase[j].upper()} are both {first.label!r}, so "
                "their difference would be noise; give strategies that differ, or labels where the arguments do."
            )
        if (first.scale, first.args) == (second.scale, second.args):
            raise ValueError(
                f"{first.label!r} and {second.label!r} are the same strategy with the same arguments; "
                "give two that differ."
            )
    if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0:
        raise ValueError(f"The seeds are {list(seeds)}; give distinct numbers from 0 up.")
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs is {jobs}; give the number of runs at a time, at least 1.")
    for argument in (*args, *(argument for arm in arms for argument in arm.args)):
        if argument.split("=", 1)[0] in _OURS:
            raise ValueError(
                f"compare sets {argument.split('=', 1)[0]} for every run; leave it out of the "
                "arguments and name strategies, seeds and the output directory instead."
            )


def _plan(
    arms: Sequence[Arm],
    seeds: Sequence[int],
    args: Sequence[str],
    out: Path,
    launcher: tuple[str, ...],
    context: Mapping[str, str],
) -> list[Job]:
    """Jobs seed by seed, so that all arms of a seed run together and a stop leaves whole pairs."""
    jobs = []
    for seed in seeds:
        for i, arm in enumerate(arms):
            # ours last: no config file among the arguments can override what defines the run
            ours = ("--model.scale", arm.scale, "--seed_everything", str(seed))
            name = _run_name(i, seed)
            arguments = (*args, *arm.args, *ours)
            jobs.append(Job(name, f"{arm.label}, seed {seed}", launcher, arguments, out / name, context))
    return jobs


def _run_name(arm: int, seed: int) -> str:
    return f"{ascii_lowercase[arm]}-seed{seed}"


def _check_arms_differ(trained: Sequence[TrainedArm]) -> None:
    for first, second in combinations(trained, 2):
        one, other = first.runs[0], second.runs[0]
        if first.arm.scale != second.arm.scale and one.config.get("model") == other.config.get("model"):
            raise ValueError(
                f"The configs of {one.dir} and {other.dir} hold the same model although the arms "
                f"are {first.arm.scale!r} and {second.arm.scale!r}; check that fit writes model.scale."
            )


def _slug(label: str) -> str:
    return re.sub(r"[^\w.+=-]+", "-", label)
