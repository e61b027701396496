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
    return sum(run_spec.cost + budget.startup_seconds for run_spec, _ in wanted)


def measured_ratio(wanted: Sequence[RunRequest], runs: RunStore) -> float | None:
    """Median of measured over estimated seconds, of the runs that are complete; None without any."""
    ratios = []
    for run_spec, seed in wanted:
        took = read_summary(runs.dir(run_spec, seed)).get("seconds")  # of this machine: none that is recorded
        if run_spec.cost and isinstance(took, float):
            ratios.append(took / run_spec.cost)
    return float(np.median(ratios)) if ratios else None


def print_dry_run(console: Console, figures: Sequence[Figure], runs: RunStore, budget: Budget, parallel: int) -> None:
    """Show every run, each figure alone and all together, and how long that takes."""
    on_cpu, total = budget.gpu is None, by_seed(run for figure in figures for run in figure.requests())
    ratio = measured_ratio(total, runs) if on_cpu else None
    missing = {job.name for job in replace(runs, context=None).missing(total)}

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def time_of(wanted: Sequence[RunRequest]) -> str:
        amount = cost(wanted, budget)
        if not on_cpu:
            return f"{amount:,.1f} GPU-hours"
        source = "as the budget estimates" if ratio is None else f"measured: {ratio:.2f} times the budget's estimate"
        return f"about {amount * (ratio or 1.0) / 60 / parallel:,.0f} min, {parallel} at a time, {source}"

    say(f"budget {budget.name}: {budget.summary}{f'; {budget.gpu}, {MFU:.0%} MFU' if budget.gpu else ''}")
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("run", overflow="fold")  # it has what the numbers leave
    unit = "seconds" if on_cpu else "GPU-hours"
    for column in ("steps", "tokens", "tokens a\nparameter", f"{unit}\na run", "runs", "done"):
        table.add_column(column, justify="right", no_wrap=True)
    alike: dict[str, list[RunRequest]] = {}
    for run_spec, seed in total:
        alike.setdefault(run_spec.identity, []).append((run_spec, seed))
    for of in sorted(alike.values(), key=lambda each: (each[0][0].model, each[0][0].strategy, each[0][0].steps)):
        run_spec, time = of[0][0], cost(of[:1], budget) * (ratio or 1.0)
        table.add_row(
            escape(f"{run_spec.model}, {run_spec.strategy}, {run_spec.details}"),
            f"{run_spec.steps:,}",
            f"{run_spec.tokens:,}",
            f"{run_spec.tokens_per_param:.1f}",
            f"{time:,.{0 if on_cpu else 1}f}",
            str(len(of)),
            str(sum(made.key(seed) not in missing for made, seed in of)),
        )
    console.print(table)
    for figure in figures:
        alone = figure.requests()
        say(f"{figure.spec.name:20} {len(alone):3} runs, alone {time_of(alone)}")
        for panel in figure.panels:
            why_not = [] if panel.why_not is None else [f"{panel.title}: not testable here: {panel.why_not}"]
            for text in (*why_not, *panel.warnings):
                say(f"{'':20} {text}")
    left = [(run_spec, seed) for run_spec, seed in total if run_spec.key(seed) in missing]
    say(
        f"together: {len(total)} runs, {time_of(total)}; missing: {len(left)} runs, {time_of(left)}. The paper trains "
        "with 100 tokens a parameter."
    )
