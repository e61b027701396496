"""Train two arms on the same seeds, side by side, and compare them in pairs.

    out/  a-seed0/ b-seed0/ a-seed1/ ...  comparison.json  comparison.png

Called again with the same arguments it trains only what is missing; with more seeds, only those.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from lightning_sv.paper.checks import (
    check_same_corpus,
    comparability_warnings,
    config_differences,
)
from lightning_sv.paper.comparison import Arm, Comparison
from lightning_sv.paper.draw import draw_comparison
from lightning_sv.paper.events import Run, read_run
from lightning_sv.paper.launch import LAUNCHER, Job, default_parallel, run_jobs

_OURS = ("--model.scale", "--seed_everything", "--run_dir")


def compare(
    a: Arm,
    b: Arm,
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
        b: The arm in question.
        seeds: One pair of runs per seed; an interval needs two, a useful one three or more.
        args: Arguments of ``fit`` for both arms, ``--config`` first.
        out: Directory of the comparison; ``runs/compare/<A>_vs_<B>`` when None.
        jobs: Runs at a time; None: one per core, at most four, a single one on a GPU. The cores
            are shared out evenly among them.
        console: Where progress goes; stderr when None, so that stdout is free for the result.
        launcher: The program that trains one run.
        confidence: Coverage of the intervals.
        context: What else decides the results (corpus, versions); finished runs of another are not reused.

    Raises:
        ValueError: For equal labels, arguments this function sets itself, a directory that holds
            other runs, or runs on different corpora or tokenizers.
        RuntimeError: When a run fails; the message ends with the last lines of its log.
    """
    console = console or Console(stderr=True)
    _check_request(a, b, seeds, args, jobs)
    out = Path("runs/compare", f"{_slug(a.label)}_vs_{_slug(b.label)}") if out is None else Path(out)
    plan = _plan(a, b, seeds, args, out, tuple(launcher), context or {})
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
            console.print("Stopped. Finished runs are kept, the same command reuses them.")
            raise

    runs = {job.name: read_run(job.run_dir) for job in plan}
    check_same_corpus(runs)
    _check_arms_differ(a, b, runs)
    differences = config_differences(runs, [*a.args, *b.args])
    comparison = Comparison(
        a=a,
        b=b,
        seeds=tuple(seeds),
        runs_a=tuple(runs[f"a-seed{k}"] for k in seeds),
        runs_b=tuple(runs[f"b-seed{k}"] for k in seeds),
        commands={job.name: [*job.record()["command"], *job.command[-2:]] for job in plan},
        reused=reused,
        differences=tuple(differences),
        warnings=tuple(comparability_warnings(runs, differences)),
        out=out,
        confidence=confidence,
    )
    (out / "comparison.json").write_text(comparison.to_json() + "\n")
    draw_comparison(
        comparison.runs_a,
        comparison.runs_b,
        out / "comparison.png",
        labels=(a.label, b.label),
        confidence=confidence,
    )
    return comparison


def _check_request(a: Arm, b: Arm, seeds: Sequence[int], args: Sequence[str], jobs: int | None) -> None:
    if a.label == b.label:
        raise ValueError(
            f"Both arms are {a.label!r}, so every difference would be noise; give two strategies, "
            "or two labels when they differ in their arguments."
        )
    if (a.scale, a.args) == (b.scale, b.args):
        raise ValueError(
            f"{a.label!r} and {b.label!r} are the same strategy with the same arguments; give two that differ."
        )
    if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0:
        raise ValueError(f"The seeds are {list(seeds)}; give distinct numbers from 0 up.")
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs is {jobs}; give the number of runs at a time, at least 1.")
    for argument in (*args, *a.args, *b.args):
        if argument.split("=", 1)[0] in _OURS:
            raise ValueError(
                f"compare sets {argument.split('=', 1)[0]} for every run; leave it out of the "
                "arguments and name strategies, seeds and the output directory instead."
            )


def _plan(
    a: Arm,
    b: Arm,
    seeds: Sequence[int],
    args: Sequence[str],
    out: Path,
    launcher: tuple[str, ...],
    context: Mapping[str, str],
) -> list[Job]:
    """Jobs pair by pair, so that both arms of a seed run together and a stop leaves whole pairs."""
    jobs = []
    for seed in seeds:
        for letter, arm in (("a", a), ("b", b)):
            # ours last: no config file among the arguments can override what defines the run
            ours = ("--model.scale", arm.scale, "--seed_everything", str(seed))
            name = f"{letter}-seed{seed}"
            arguments = (*args, *arm.args, *ours)
            jobs.append(Job(name, f"{arm.label}, seed {seed}", launcher, arguments, out / name, context))
    return jobs


def _check_arms_differ(a: Arm, b: Arm, runs: Mapping[str, Run]) -> None:
    first, second = (next(r for n, r in runs.items() if n.startswith(x)) for x in ("a-", "b-"))
    if a.scale != b.scale and first.config.get("model") == second.config.get("model"):
        raise ValueError(
            f"The configs of {first.dir} and {second.dir} hold the same model although the arms "
            f"are {a.scale!r} and {b.scale!r}; check that fit writes model.scale."
        )


def _slug(label: str) -> str:
    return re.sub(r"[^\w.+=-]+", "-", label)
