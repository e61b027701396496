"""Train the arms of a comparison, a figure of one panel, on the same seeds; and compare them in pairs.

    out/  comparison.json  comparison.png  report.html  report.md  ...  [sharpness.png .csv]

Runs are named by what they train, and found again in any comparison beside this one: called again it trains only what
is missing; with more seeds or further arms, only those.
"""

import re
import shlex
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from lightning_sv.analysis.losses import draw_comparison
from lightning_sv.analysis.sharpness import draw_sharpness, has_sharpness, sharpness_rows
from lightning_sv.errors import ConfigError, RunError
from lightning_sv.experiments.checks import (
    check_same_corpus,
    comparability_warnings,
    config_differences,
    rests_on,
)
from lightning_sv.experiments.comparison import Comparison, in_words, run_name
from lightning_sv.experiments.judge import decided, read
from lightning_sv.experiments.report.tables import check_replaceable, write_csv
from lightning_sv.experiments.report.write import write_report
from lightning_sv.experiments.results import Figure, Panel
from lightning_sv.experiments.runs import Runs, diverged
from lightning_sv.experiments.sources.own_runs import COMPARISON, with_branches
from lightning_sv.experiments.train import train
from lightning_sv.runs.directory import is_complete
from lightning_sv.whole import whole


def default_out(figure: Figure, model: str, corpus: str, command: str = "compare") -> Path:
    """`runs/compare/tiny-stdlib/llama_vs_unified_nop`, or `runs/sweep/tiny-stdlib/llama_unified`.

    Args:
        figure: the comparison or sweep
        model: name of the baseline's
        corpus: its directory
        command: which of the two it is
    """
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
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs is {jobs}; give the number of runs at a time, at least 1.")
    check_replaceable(out, [runs.dir(*run).parent for run in figure.runs()[:1]])
    _say_what_is_there(figure, runs, out, console)
    reused = {recipe.key(seed) for recipe, seed in figure.runs() if runs.job(recipe, seed).state() == "complete"}
    for recipe, seed in figure.runs():
        if recipe.key(seed) in reused:
            where = f"{runs.dir(recipe, seed)} is complete with the same configuration"
            console.print(f"{recipe.title}, seed {seed}: reused, {where}", markup=False, highlight=False)
    failed = train([figure], runs, parallel=jobs, console=console)
    panel = read(figure.panels[0], runs)
    if failed or panel.why_not is not None:
        raise RunError(next(iter(failed.values()), panel.why_not))
    arms = panel.arms
    named = {run_name(i, seed): arm.runs[k] for k, seed in enumerate(arms[0].seeds) for i, arm in enumerate(arms)}
    differences = config_differences(named, [key for arm in panel.spec.arms.values() for key in arm.set])
    check_same_corpus(named)
    warnings = (*comparability_warnings(named, differences), *rests_on(panel))
    (judged,) = decided([replace(figure, panels=(panel,), warnings=warnings, command=command)])
    judged = with_branches(in_words(judged))
    comparison = Comparison(judged, named, frozenset(reused), tuple(differences), runs, out)
    write_report([judged], out, "a comparison of your own")
    _write(comparison)
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
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs is {jobs}; give the number of runs at a time, at least 1.")
    check_replaceable(out, [runs.dir(*run).parent for run in figure.runs()[:1]])
    failed = train([figure], runs, parallel=jobs, console=console or Console(stderr=True))
    panel = read(figure.panels[0], runs)
    lost = [failed[r.key(s)] for r, s in figure.runs() if r.key(s) in failed and not diverged(runs.job(r, s))]
    if lost or panel.why_not is not None:
        raise RunError(lost[0] if lost else f"{panel.why_not}; give other values.")
    write_report([replace(figure, panels=(panel,), command=command)], out, "a sweep of your own")
    return panel


def _say_what_is_there(figure: Figure, runs: Runs, out: Path, console: Console) -> None:
    """Say what happens to runs that an earlier version named by arm and seed."""
    old = [path for path in sorted(out.glob("[a-z]-seed*")) if is_complete(path)]
    if old:
        console.print(
            f"{old[0]} and {len(old) - 1} more finished runs are named as in an earlier version: they stay and are not "
            f"used here; lightning-sv report {shlex.quote(str(out))} draws them.",
            markup=False,
            highlight=False,
        )


def _write(comparison: Comparison) -> None:
    """`comparison.json`, the chart, and the sharpness where every run measured it."""
    out, arms = comparison.out, comparison.arms
    labels, runs = [arm.label for arm in arms], [arm.runs for arm in arms]
    with whole(out / COMPARISON) as partial:
        partial.write_text(comparison.to_json() + "\n")
    draw_comparison(runs, out / "comparison.png", labels=labels)
    if has_sharpness([run for of in runs for run in of]):
        draw_sharpness(runs, out / "sharpness.png", labels=labels)
        write_csv(out / "sharpness.csv", sharpness_rows(runs, labels))
