"""What a regeneration takes, before anything starts: runs, steps, tokens a parameter, time."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_sv.experiments.results import Figure, RunRequest, by_seed
from lightning_sv.experiments.run_spec import MFU
from lightning_sv.experiments.run_store import RunStore
from lightning_sv.experiments.spec import Budget
from lightning_sv.runs.directory import read_summary


def cost(wanted: Sequence[RunRequest], budget: Budget) -> float:
    """Seconds of one core, or GPU-hours, of these runs."""
    if budget.gpu is not None:
        return sum(run_spec.gpu_hours or 0.0 for run_spec, _ in wanted)
    return sum((run_spec.seconds or 0.0) + budget.startup_seconds for run_spec, _ in wanted)


def measured_ratio(wanted: Sequence[RunRequest], runs: RunStore) -> float | None:
    """Median of measured over estimated seconds, of the runs that are complete; None without any."""
    ratios = []
    for run_spec, seed in wanted:
        took = read_summary(runs.dir(run_spec, seed)).get("seconds")  # of this machine: none that is recorded
        if run_spec.seconds and isinstance(took, float):
            ratios.append(took / run_spec.seconds)
    return float(np.median(ratios)) if ratios else None


def print_dry_run(console: Console, figures: Sequence[Figure], runs: RunStore, budget: Budget, parallel: int) -> None:
    """Show every run, each figure alone and all together, and how long that takes."""
    total = by_seed(run for figure in figures for run in figure.requests())
    ratio = measured_ratio(total, runs)
    missing = {job.name for job in replace(runs, context=None).missing(total)}
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("run", overflow="fold")  # it has what the numbers leave
    unit = "seconds" if budget.gpu is None else "GPU-hours"
    for column in ("steps", "tokens", "tokens a\nparameter", f"{unit}\na run", "runs", "done"):
        table.add_column(column, justify="right", no_wrap=True)
    grouped: dict[str, list[RunRequest]] = {}
    for run_spec, seed in total:
        grouped.setdefault(run_spec.identity, []).append((run_spec, seed))
    for of in sorted(grouped.values(), key=lambda each: (each[0][0].model, each[0][0].strategy, each[0][0].steps)):
        run_spec, each = of[0][0], cost(of[:1], budget) * (ratio or 1.0)
        words = escape(f"{run_spec.model}, {run_spec.strategy}, {run_spec.details}")
        size = (f"{run_spec.steps:,}", f"{run_spec.tokens:,}", f"{run_spec.tokens_per_param:.1f}")
        time = f"{each:,.0f}" if budget.gpu is None else f"{each:,.1f}"
        table.add_row(words, *size, time, str(len(of)), str(sum(r.key(s) not in missing for r, s in of)))

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    say(f"budget {budget.name}: {budget.summary}{f'; {budget.gpu}, {MFU:.0%} MFU' if budget.gpu else ''}")
    console.print(table)

    def time_of(wanted: Sequence[RunRequest]) -> str:
        amount = cost(wanted, budget)
        if budget.gpu is not None:
            return f"{amount:,.1f} GPU-hours"
        source = "as the budget estimates" if ratio is None else f"measured: {ratio:.2f} times the budget's estimate"
        return f"about {amount * (ratio or 1.0) / 60 / parallel:,.0f} min, {parallel} at a time, {source}"

    for figure in figures:
        alone = figure.requests()
        say(f"{figure.spec.name:20} {len(alone):3} runs, alone {time_of(alone)}")
        for panel in figure.panels:
            if panel.why_not is not None:
                say(f"{'':20} {panel.spec.title}: not testable here: {panel.why_not}")
            for warning in panel.warnings:
                say(f"{'':20} {warning}")
    left = [run for run in total if run[0].key(run[1]) in missing]
    say(
        f"together: {len(total)} runs, {time_of(total)}; missing: {len(left)} runs, {time_of(left)}. The paper trains "
        "with 100 tokens a parameter."
    )
