"""Comparisons and sweeps: train the missing runs of a figure of one panel, and report them.

    out/  comparison.json  report.html  report.md  ...

The name of a run is a hash of its configuration, so that all comparisons in one folder share runs.
"""

import json
import logging
import os
import re
import shlex
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from lightning_sv.atomic import write_atomically
from lightning_sv.errors import RunError
from lightning_sv.experiments.arms import Arm
from lightning_sv.experiments.comparability import check_same_corpus, comparability_warnings
from lightning_sv.experiments.evaluate import load_panels
from lightning_sv.experiments.kinds.base import LoadedPanel
from lightning_sv.experiments.kinds.curves import LATE_TRAINING
from lightning_sv.experiments.report.folder import check_replaceable, reported_runs
from lightning_sv.experiments.report.write import write_report
from lightning_sv.experiments.results import Figure, PlannedFigure
from lightning_sv.experiments.run_store import RunStore, train
from lightning_sv.experiments.sources.from_runs import COMPARISON, described, print_pairs
from lightning_sv.runs.events import Run
from lightning_sv.runs.job import Job
from lightning_sv.settings.yaml_file import to_args

log = logging.getLogger(__name__)


def default_out(figure: PlannedFigure, model: str, corpus: str, command: str = "compare") -> Path:
    """Return `runs/compare/tiny-stdlib/llama_vs_unified_nop`, or `runs/sweep/tiny-stdlib/llama_unified`."""
    labels = (f"{model}-{Path(corpus).name}", *figure.panels[0].spec.arms)
    where, a, *others = (re.sub(r"[^\w.+=-]+", "-", label) for label in labels)
    return Path("runs", command, where, "_".join([a, *(["vs"] if command == "compare" else []), *others]))


def free_out(base: Path, figure: PlannedFigure, runs: RunStore) -> Path:
    """Return `base`, with a number if it has the report of a figure of other settings."""
    for number in count(1):
        out = base if number == 1 else base.with_name(f"{base.name}-{number}")
        if not replaces_other_settings(out, figure, runs):
            return out
    raise AssertionError


def replaces_other_settings(out: Path, figure: PlannedFigure, runs: RunStore) -> bool:
    """Return whether a folder has a report without runs of some arm of the figure.

    Names of arms do not tell, because they do not contain settings of all arms, such as the optimizer.
    """
    reported = {run.name for run in reported_runs(out)}
    if not reported:
        return False
    (panel,) = figure.panels
    runs_of_arms = dict[str, set[str]]()
    for arm in panel.arms:
        names = {runs.dir(*request).name for request in arm.requests}
        runs_of_arms.setdefault(arm.series or arm.label, set()).update(names)
    return any(reported.isdisjoint(names) for names in runs_of_arms.values())


def _check_out(out: Path, figure: PlannedFigure, runs: RunStore) -> None:
    """Refuse to replace files of others, and warn about a report of other settings."""
    check_replaceable(out, [runs.dir(*run).parent for run in figure.requests()[:1]])
    if replaces_other_settings(out, figure, runs):
        log.warning("the report in %s is of other settings and will be replaced; its runs are kept", out)


def compare(
    figure: PlannedFigure, runs: RunStore, out: Path, *, jobs: int | None = None, console: Console, command: str = ""
) -> Figure:
    """Train missing runs, check that runs are comparable, write the results, and return the figure with its runs.

    The figure has one panel, the baseline first. `jobs` runs are trained at a time: by default one per core, at most
    four, and one on a GPU. `comparison.json` has all numbers.

    Raises:
        RunError: a run failed; the message ends with the last lines of its log, and other runs continue
    """
    _check_out(out, figure, runs)
    failed = train([figure], runs, parallel=jobs, console=console)
    (panel,) = load_panels(figure.panels, runs)
    if failed or panel.why_not is not None or len(panel.arms) < 2:
        raise RunError(next(iter(failed.values()), panel.why_not or panel.warnings[-1]))
    named = _runs_by_name(panel)
    check_same_corpus(named)
    asked = [key for arm in panel.spec.arms.values() for key in arm.overrides]
    warnings = (*comparability_warnings(named, asked), *panel.warnings, *panel.unpaired)
    result = Figure(
        figure.spec,
        described(panel),
        warnings=warnings,
        command=command,
        tokens_per_param=figure.tokens_per_param,
    )
    write_report([result], out, "a comparison of your own")
    jobs_by_dir = {job.run_dir: job for job in (runs.job(*request) for request in figure.requests())}
    numbers = {
        "unit": "nats per token",
        "seeds": sorted(set(panel.arms[0].seeds).intersection(*(arm.seeds for arm in panel.arms))),
        "arms": [_arm_numbers(arm, panel) for arm in panel.arms],
        "differences": [pair.to_dict() for pair in panel.pairs],
        "runs": [_run_numbers(name, run, jobs_by_dir[run.dir], out) for name, run in named.items()],
        "diverged": {arm.label: len(arm.diverged) for arm in panel.every if arm.diverged},
        "warnings": list(warnings),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_atomically(out / COMPARISON, json.dumps(numbers, indent=2, default=str) + "\n")
    return result


def _runs_by_name(panel: LoadedPanel) -> dict[str, Run]:
    """Return the runs of a comparison, seed by seed, with names such as `a-seed0`."""
    runs = []
    for letter, arm in zip(ascii_lowercase, panel.arms, strict=False):
        runs += [(seed, letter, run) for seed, run in arm.by_seed.items()]
    runs.sort(key=lambda run: run[:2])
    return {f"{letter}-seed{seed}": run for seed, letter, run in runs}


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


def _run_numbers(name: str, run: Run, job: Job, out: Path) -> dict[str, Any]:
    return {
        "name": name,
        "dir": os.path.relpath(run.dir, out),
        "command": shlex.join([*job.record()["command"], *job.here[:2]]),
        "val_loss": run.val_loss,
        "tokens": run.tokens,
        "summary": dict(run.summary),
    }


def print_comparison(console: Console, figure: Figure, out: Path) -> None:
    """Print the table of a comparison, sentences, warnings and the paths of its files."""
    panel = figure.panels[0]
    shown = panel.kind.table(panel).drop(columns=["each seed", LATE_TRAINING])  # too wide for 80 columns
    table = Table(*(Column(name, overflow="fold") for name in shown.columns))
    for row in shown.to_numpy():
        table.add_row(*map(escape, row))
    console.print(table)
    print_pairs(console, panel.pairs, figure.warnings)
    for name in (COMPARISON, "report.html"):
        console.print(str(out / name), markup=False, highlight=False, soft_wrap=True)


def sweep(
    figure: PlannedFigure, runs: RunStore, out: Path, *, jobs: int | None = None, console: Console, command: str
) -> LoadedPanel:
    """Train missing runs of a grid, write its report, and return the panel without points that diverged.

    Raises:
        RunError: a run failed and did not diverge, or all points of an arm diverged
    """
    _check_out(out, figure, runs)
    failed = train([figure], runs, parallel=jobs, console=console)
    (panel,) = load_panels(figure.panels, runs)
    if failed or panel.why_not is not None:
        raise RunError(next(iter(failed.values()), f"{panel.why_not}; give other values."))
    report = Figure(
        figure.spec,
        (panel,),
        warnings=panel.warnings,
        command=command,
        tokens_per_param=figure.tokens_per_param,
    )
    write_report([report], out, "a sweep of your own")
    return panel
