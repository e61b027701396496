"""Comparisons and sweeps: train the missing runs of a figure of one panel, and report them.

    out/  comparison.json  report.html  report.md  ...

The name of a run is a hash of its configuration, so that all comparisons in one folder share runs.
"""

import json
import os
import re
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from lightning_sv.atomic import write_atomically
from lightning_sv.errors import RunError
from lightning_sv.experiments.arms import Arm
from lightning_sv.experiments.comparability import (
    check_same_corpus,
    comparability_warnings,
    requested_keys,
    runs_by_name,
)
from lightning_sv.experiments.evaluate import load_panels
from lightning_sv.experiments.kinds.base import LoadedPanel
from lightning_sv.experiments.kinds.curves import LATE_TRAINING
from lightning_sv.experiments.report.folder import check_replaceable, reported_runs
from lightning_sv.experiments.report.write import write_report
from lightning_sv.experiments.results import Figure, PlannedFigure
from lightning_sv.experiments.run_spec import ParsedRun
from lightning_sv.experiments.run_store import RunStore, context_of, train_missing
from lightning_sv.experiments.sources.from_runs import COMPARISON, described, print_pairs
from lightning_sv.settings.overrides import to_args


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
    return out or _free_out(default, figure, runs), runs


def _default_out(figure: PlannedFigure, run: ParsedRun, command: str) -> Path:
    """Return `runs/compare/tiny-stdlib/llama_vs_unified_nop`, or of a sweep `.../llama_unified`."""
    place = f"{run.model.backbone.name}-{Path(run.data.corpus.dir).name}"
    first, *others = map(_file_name, figure.panels[0].spec.arms)
    if command == "compare":
        others = ["vs", *others]
    return Path("runs", command, _file_name(place), "_".join([first, *others]))


def _file_name(label: str) -> str:
    return re.sub(r"[^\w.+=-]+", "-", label)


def _free_out(base: Path, figure: PlannedFigure, runs: RunStore) -> Path:
    """Return `base`, with a number if it has the report of a figure of other settings."""
    out = base
    numbers = count(2)
    while _has_other_settings(out, figure, runs):
        out = base.with_name(f"{base.name}-{next(numbers)}")
    return out


def _has_other_settings(out: Path, figure: PlannedFigure, runs: RunStore) -> bool:
    """Return whether a folder has a report of the same arms with other settings.

    Settings of all arms, such as the optimizer, are not in the name of the folder.
    """
    reported = {run.name for run in reported_runs(out)}
    requested = {runs.dir(*request).name for request in figure.requests()}
    return bool(reported) and reported.isdisjoint(requested)


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
    for message in failed.values():
        raise RunError(message)
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
    """Train missing runs, check that runs are comparable, write the results.

    `comparison.json` has all numbers.

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
        raise RunError(panel.warnings[-1])

    named = runs_by_name(panel.arms)
    check_same_corpus(named)
    differences = comparability_warnings(named, requested_keys(panel))
    warnings = [*differences, *panel.warnings, *panel.unpaired]
    result = figure.with_runs(described(panel), warnings, command)
    write_report([result], out, "a comparison of your own")

    numbers = _numbers(panel) | {"runs": _run_rows(panel, runs, out), "warnings": warnings}
    write_atomically(out / COMPARISON, json.dumps(numbers, indent=2, default=str) + "\n")
    return result


def _numbers(panel: LoadedPanel) -> dict[str, Any]:
    """Return the numbers of a comparison, without its runs."""
    seeds_of_arms = [set(arm.seeds) for arm in panel.arms]
    diverged = [arm for arm in panel.every if arm.diverged]
    return {
        "unit": "nats per token",
        "seeds": sorted(set.intersection(*seeds_of_arms)),
        "arms": [_arm_numbers(arm, panel) for arm in panel.arms],
        "differences": [pair.to_dict() for pair in panel.pairs],
        "diverged": {arm.label: len(arm.diverged) for arm in diverged},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _run_rows(panel: LoadedPanel, runs: RunStore, out: Path) -> list[dict[str, Any]]:
    """Return the numbers of each run, arm by arm."""
    rows = []
    for arm in panel.arms:
        assert arm.run_spec is not None
        for seed, run in arm.by_seed.items():
            job = runs.job(arm.run_spec, seed)
            row = {
                "arm": arm.label,
                "seed": seed,
                "dir": os.path.relpath(run.dir, out),
                "command": shlex.join([*job.record()["command"], *job.here[:2]]),
                "val_loss": run.val_loss,
                "tokens": run.tokens,
                "summary": dict(run.summary),
            }
            rows.append(row)
    return rows


def _arm_numbers(arm: Arm, panel: LoadedPanel) -> dict[str, Any]:
    spec = panel.spec.arms[arm.label]
    return {
        "label": arm.label,
        "scale": spec.scale,
        "args": to_args(spec.overrides),
        "seeds": list(arm.seeds),
        "val_loss": float(np.mean(arm.losses)),
        "val_loss_per_seed": arm.losses.tolist(),
    }


def print_comparison(console: Console, figure: Figure, out: Path) -> None:
    """Print the table of a comparison, sentences, warnings and the paths of its files."""
    panel = figure.panels[0]
    too_wide = ["each seed", LATE_TRAINING]  # for 80 columns
    shown = panel.kind.table(panel).drop(columns=too_wide)
    table = Table(*(Column(name, overflow="fold") for name in shown.columns))
    for row in shown.to_numpy():
        table.add_row(*map(escape, row))
    console.print(table)
    print_pairs(console, panel.pairs, figure.warnings)
    for name in (COMPARISON, "report.html"):
        console.print(str(out / name), markup=False, highlight=False, soft_wrap=True)


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
        RunError: a run failed and did not diverge, or all points of an arm diverged
    """
    panel = _train(figure, runs, out, jobs, console)
    if panel.why_not is not None:
        raise RunError(f"{panel.why_not}; give other values.")
    report = figure.with_runs([panel], panel.warnings, command)
    write_report([report], out, "a sweep of your own")
    return panel
