"""Train the arms of a comparison, a figure of one panel, on the same seeds; and compare them in pairs.

    out/  comparison.json  comparison.png  report.html  report.md  ...  [sharpness.png .csv]

Runs are named by what they train, and found again in any comparison beside this one: called again it trains only what
is missing; with more seeds or further arms, only those.
"""

import re
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase

from rich.console import Console

from lightning_sv.analysis.losses import draw_comparison
from lightning_sv.analysis.sharpness import draw_sharpness, has_sharpness, sharpness_rows
from lightning_sv.errors import ConfigError, RunError
from lightning_sv.experiments.checks import check_same_corpus, comparability_warnings, config_differences, rests_on
from lightning_sv.experiments.comparison import Comparison, in_words
from lightning_sv.experiments.judge import decided, read
from lightning_sv.experiments.report.tables import check_replaceable, write_csv
from lightning_sv.experiments.report.write import write_report
from lightning_sv.experiments.results import Figure, Panel
from lightning_sv.experiments.runs import Runs, diverged
from lightning_sv.experiments.sources.own_runs import COMPARISON, with_branches
from lightning_sv.experiments.train import train
from lightning_sv.whole import whole


def default_out(figure: Figure, model: str, corpus: str, command: str = "compare") -> Path:
    """`runs/compare/tiny-stdlib/llama_vs_unified_nop`, or `runs/sweep/tiny-stdlib/llama_unified`."""
    words = (f"{model}-{Path(corpus).name}", *figure.panels[0].spec.arms)
    where, a, *others = (re.sub(r"[^\w.+=-]+", "-", word) for word in words)
    return Path(
        "runs", command, where, f"{a}_vs_{'_'.join(others)}" if command == "compare" else "_".join([a, *others])
    )


def compare(
    figure: Figure, runs: Runs, out: Path, *, jobs: int | None = None, console: Console | None = None, command: str = ""
) -> Comparison:
    """Run what is missing, check that the runs are comparable, write figures, pictures and the report.

    Args:
        figure: of one panel, the baseline first, see `lightning_sv.experiments.sources.compared.compared_figure`
        runs: those that are there, and what trains the others
        out: directory of the comparison
        jobs: runs at a time; None: one per core, at most four, a single one on a GPU
        console: where progress goes; stderr when None, so that stdout is free for the result
        command: what the report says made it

    Raises:
        ConfigError: a directory that holds another run or report, or runs on different corpora or tokenizers
        RunError: a run fails; the message ends with the last lines of its log, and the others are trained
    """
    console = console or Console(stderr=True)
    _check(figure, runs, out, jobs)
    reused = set[str]()
    for recipe, seed in figure.runs():
        if (job := runs.job(recipe, seed)).state() == "complete":
            reused.add(job.name)
            where = f"{job.run_dir} is complete with the same configuration"
            console.print(f"{job.title}: reused, {where}", markup=False, highlight=False)
    failed = train([figure], runs, parallel=jobs, console=console)
    panel = read(figure.panels[0], runs)
    if failed or panel.why_not is not None:
        raise RunError(next(iter(failed.values()), panel.why_not))
    letters = list(zip(ascii_lowercase, panel.arms, strict=False))
    named = {f"{x}-seed{seed}": arm.runs[k] for k, seed in enumerate(panel.arms[0].seeds) for x, arm in letters}
    jobs_of = {f"{x}-seed{seed}": runs.job(recipe, seed) for x, arm in letters for recipe, seed in arm.wanted}
    commands = {name: [*job.record()["command"], *job.here[:2]] for name, job in jobs_of.items()}
    differences = config_differences(named, [key for arm in panel.spec.arms.values() for key in arm.set])
    check_same_corpus(named)
    warnings = (*comparability_warnings(named, differences), *rests_on(panel))
    (judged,) = decided([replace(figure, panels=(panel,), warnings=warnings, command=command)])
    judged = with_branches(in_words(judged))
    comparison = Comparison(judged, named, commands, frozenset(reused), tuple(differences), out)
    write_report([judged], out, "a comparison of your own")
    with whole(out / COMPARISON) as partial:
        partial.write_text(comparison.to_json() + "\n")
    labels, of_arms = [arm.label for arm in panel.arms], [arm.runs for arm in panel.arms]
    draw_comparison(of_arms, out / "comparison.png", labels=labels)
    if has_sharpness(list(named.values())):
        draw_sharpness(of_arms, out / "sharpness.png", labels=labels)
        write_csv(out / "sharpness.csv", sharpness_rows(of_arms, labels))
    return comparison


def sweep(
    figure: Figure, runs: Runs, out: Path, *, jobs: int | None = None, console: Console | None = None, command: str = ""
) -> Panel:
    """Run what is missing of a grid, and write its report; return the panel with its runs.

    A run that diverges is left out with its point.

    Args:
        figure: of one grid, see `lightning_sv.experiments.sources.compared.swept_figure`
        runs: those that are there, and what trains the others
        out: directory of the report
        jobs: runs at a time; None: see `compare`
        console: where progress goes; stderr when None
        command: what the report says made it

    Raises:
        ConfigError: a directory that holds another run or report, or no number of jobs
        RunError: a run fails, and does not diverge; or every run of an arm diverges
    """
    _check(figure, runs, out, jobs)
    failed = train([figure], runs, parallel=jobs, console=console or Console(stderr=True))
    panel = read(figure.panels[0], runs)
    lost = [failed[r.key(s)] for r, s in figure.runs() if r.key(s) in failed and not diverged(runs.job(r, s))]
    if lost or panel.why_not is not None:
        raise RunError(lost[0] if lost else f"{panel.why_not}; give other values.")
    write_report([replace(figure, panels=(panel,), command=command)], out, "a sweep of your own")
    return panel


def _check(figure: Figure, runs: Runs, out: Path, jobs: int | None) -> None:
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs is {jobs}; give the number of runs at a time, at least 1.")
    check_replaceable(out, [runs.dir(*run).parent for run in figure.runs()[:1]])
