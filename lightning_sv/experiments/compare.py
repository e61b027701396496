"""Comparisons and sweeps: train the missing runs of a figure of one panel, and report them.

    out/  report.html  report.md  results.csv  differences.csv  ...

The name of a run is a hash of its configuration, so that all comparisons in one folder share runs.
"""

import os
import re
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from lightning_sv.errors import RunError
from lightning_sv.experiments.comparability import (
    check_same_corpus,
    runs_by_name,
    training_warnings,
)
from lightning_sv.experiments.evaluate import load_panels
from lightning_sv.experiments.kinds.base import LoadedPanel
from lightning_sv.experiments.kinds.curves import LATE_TRAINING
from lightning_sv.experiments.report.folder import HTML, check_replaceable, reported_runs
from lightning_sv.experiments.report.results_csv import RESULTS, write_csv
from lightning_sv.experiments.report.write import write_report
from lightning_sv.experiments.results import Figure, PlannedFigure
from lightning_sv.experiments.run_spec import ParsedRun
from lightning_sv.experiments.run_store import RunStore, context_of, train_missing
from lightning_sv.experiments.sources.from_runs import print_pairs, reported_panels


def output_of(
    figure: PlannedFigure,
    run: ParsedRun,
    command: str,
    out: Path | None,
    launcher: Sequence[str],
) -> tuple[Path, RunStore]:
    """Return the output directory of a comparison or sweep, and its runs.

    Args:
        figure: figure of one panel
        run: run of the first arm, whose model and corpus name the default directory
        command: `compare` or `sweep`
        out: directory with its own runs; default directories share theirs
        launcher: program of a run
    """
    default = _default_out(figure, run, command)
    runs = RunStore(out or default.parent, context_of(run.data), launcher)
    return out or _own_folder(default, figure, runs), runs


def _default_out(figure: PlannedFigure, run: ParsedRun, command: str) -> Path:
    """Return `runs/compare/tiny-stdlib/llama_vs_unified_nop`, or of a sweep `.../llama_unified`."""
    place = f"{run.model.backbone.name}-{Path(run.data.corpus.dir).name}"
    first, *others = map(_file_name, figure.panels[0].spec.arms)
    if command == "compare":
        others = ["vs", *others]
    return Path("runs", command, _file_name(place), "_".join([first, *others]))


def _file_name(label: str) -> str:
    return re.sub(r"[^\w.+=-]+", "-", label)


def _own_folder(base: Path, figure: PlannedFigure, runs: RunStore) -> Path:
    """Return `base`, with a number if it has runs that the figure lacks.

    Settings of all arms, such as the optimizer, are not in the name of the folder. The arms can
    have a run in common, so one equal run does not make the report one of this figure.
    """
    planned = {request.name: runs.dir(request) for request in figure.requests()}
    out = base
    numbers = count(2)
    while not _claim(out, planned):
        out = base.with_name(f"{base.name}-{next(numbers)}")
    return out


def _claim(out: Path, planned: Mapping[str, Path]) -> bool:
    """Make a folder, or return whether an existing one has planned runs only: name -> directory.

    A new folder has the planned runs at once, so that a command that starts meanwhile sees them.
    """
    try:
        out.mkdir(parents=True)
    except FileExistsError:
        names = {run.name for run in reported_runs(out)}
        return names != set() and names.issubset(planned)
    paths = [os.path.relpath(run_dir, out) for run_dir in planned.values()]
    write_csv(out / RESULTS, pd.DataFrame({"run": paths}))
    return True


def _train(
    figure: PlannedFigure, runs: RunStore, out: Path, jobs: int | None, console: Console
) -> LoadedPanel:
    """Train the missing runs of a figure of one panel, and return the panel.

    Raises:
        ConfigError: the output directory has files of others
        RunError: a run failed; the message ends with the last lines of its log, and other runs
            continue
    """
    check_replaceable(out, [runs.out / "runs"])
    failed = train_missing([figure], runs, parallel=jobs, console=console)
    if failed:
        first_message = next(iter(failed.values()))
        raise RunError(first_message)
    (panel,) = load_panels(figure.panels, runs)
    return panel


def compare(
    figure: PlannedFigure,
    runs: RunStore,
    out: Path,
    *,
    jobs: int | None = None,
    console: Console,
    command: str = "",
) -> Figure:
    """Train missing runs, check that runs are comparable, write the report.

    Args:
        figure: figure of one panel, the baseline first
        runs: runs of the figure
        out: output directory
        jobs: runs that are trained at a time; by default one per core, at most four, and one on a
            GPU
        console: console for the progress
        command: command of the report

    Returns:
        The figure with its runs.

    Raises:
        RunError: a run failed, or only one arm has runs
    """
    panel = _train(figure, runs, out, jobs, console)
    if panel.why_not is not None:
        raise RunError(panel.why_not)
    if len(panel.arms) < 2:
        reasons = [arm.why_no_runs for arm in panel.all_arms if not arm.runs]
        raise RunError(f"{'; '.join(reasons)}; nothing is left to compare.")

    named = runs_by_name(panel.arms)
    check_same_corpus(named)
    warnings = (*training_warnings(named), *panel.warnings, *panel.unpaired)
    result = Figure(figure.spec, reported_panels(panel), warnings=warnings, command=command)
    write_report([result], out, "a comparison of your own")
    return result


def print_comparison(console: Console, figure: Figure, out: Path) -> None:
    """Print the table of a comparison, sentences, warnings and the path of its page."""
    panel = figure.panels[0]
    too_wide = ["each seed", LATE_TRAINING]  # for 80 columns
    shown = panel.kind.table(panel).drop(columns=too_wide)
    table = Table(*(Column(name, overflow="fold") for name in shown.columns))
    for row in shown.to_numpy():
        table.add_row(*map(escape, row))
    console.print(table)
    print_pairs(console, panel.pairs, figure.warnings)
    console.print(str(out / HTML), markup=False, highlight=False, soft_wrap=True)


def sweep(
    figure: PlannedFigure,
    runs: RunStore,
    out: Path,
    *,
    jobs: int | None = None,
    console: Console,
    command: str,
) -> LoadedPanel:
    """Train missing runs of a grid, write its report, and return the panel.

    The panel has no points that diverged. The arguments are those of `compare`.

    Raises:
        RunError: a run failed and did not diverge, or all runs diverged
    """
    panel = _train(figure, runs, out, jobs, console)
    if panel.why_not is not None:
        raise RunError(f"{panel.why_not}; give other values.")
    report = Figure(figure.spec, (panel,), warnings=panel.warnings, command=command)
    write_report([report], out, "a sweep of your own")
    return panel
