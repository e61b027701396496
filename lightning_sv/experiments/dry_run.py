"""What a regeneration takes, before anything starts: runs, steps, tokens a parameter, time."""

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_sv.experiments.recipe import MFU, Recipe, by_seed
from lightning_sv.experiments.results import Figure
from lightning_sv.experiments.runs import Runs
from lightning_sv.experiments.spec import Budget
from lightning_sv.runs.directory import is_complete, read_summary


def cost(wanted: Sequence[tuple[Recipe, int]], budget: Budget) -> float:
    """Seconds of one core, or GPU-hours, of these runs."""
    if budget.gpu is not None:
        return sum(recipe.gpu_hours or 0.0 for recipe, _ in wanted)
    return sum((recipe.seconds or 0.0) + budget.startup_seconds for recipe, _ in wanted)


def rule_runs(figure: Figure, budget: Budget) -> list[tuple[Recipe, int]]:
    """Runs that the rules of a figure may ask for at most: the most pairs of each, each arm at its dearest value."""
    found = []
    for panel in figure.panels:
        if panel.spec.rule is not None:
            for series in panel.series:
                of = [run for name in series.arms for run in panel.arm(name).wanted[:1]]
                dearest, first = max(of, key=lambda run: cost([run], budget))[0], len(panel.arms[0].seeds)
                found += [(dearest, first + i) for i in range(panel.spec.rule.budget)]
    return found


def measured_ratio(wanted: Sequence[tuple[Recipe, int]], runs: Runs) -> float | None:
    """Median of measured over estimated seconds, of the runs that are complete; None without any."""
    ratios = []
    for recipe, seed in wanted:
        took = read_summary(runs.dir(recipe, seed)).get("seconds")
        if recipe.seconds and isinstance(took, float):
            ratios.append(took / recipe.seconds)
    return float(np.median(ratios)) if ratios else None


def print_dry_run(console: Console, figures: Sequence[Figure], runs: Runs, budget: Budget, parallel: int) -> None:
    """Show every run, each figure alone and all together, and how long that takes.

    Args:
        console: shows it
        figures: what would be trained
        runs: those that are there already
        budget: models, steps and seeds of the runs
        parallel: runs at a time
    """
    known = by_seed(run for figure in figures for run in figure.runs())
    later = by_seed(run for figure in figures for run in rule_runs(figure, budget))
    ratio = measured_ratio(known, runs)
    total = by_seed([*known, *later])
    missing = {r.key(s) for r, s in total if not is_complete(runs.dir(r, s))}
    table = Table(title=f"budget {budget.name}: {escape(budget.summary)}", title_justify="left")
    unit = "seconds a run" if budget.gpu is None else f"GPU-hours a run ({budget.gpu}, {MFU:.0%} MFU)"
    for column in ("model", "strategy", "with", "steps", "tokens", "a parameter", unit, "runs", "complete"):
        words = column in ("model", "strategy", "with")
        table.add_column(column, justify="left" if words else "right", no_wrap=not words,
                         min_width=14 if words else None, overflow="fold")  # fmt: skip
    grouped: dict[str, list[tuple[Recipe, int]]] = {}
    for recipe, seed in total:
        grouped.setdefault(recipe.identity, []).append((recipe, seed))
    for of in sorted(grouped.values(), key=lambda each: (each[0][0].model, each[0][0].strategy, each[0][0].steps)):
        recipe, each = of[0][0], cost(of[:1], budget) * (ratio or 1.0)
        complete = sum(recipe.key(seed) not in missing for recipe, seed in of)
        table.add_row(
            escape(recipe.model), escape(recipe.strategy), escape(recipe.details), f"{recipe.steps:,}",
            f"{recipe.tokens:,}",
            f"{recipe.tokens_per_param:.1f}", f"{each:,.0f}" if budget.gpu is None else f"{each:,.1f}",
            str(len(of)), str(complete),
        )  # fmt: skip
    console.print(table)
    for figure in figures:
        alone = by_seed([*figure.runs(), *rule_runs(figure, budget)])
        console.print(
            f"{figure.spec.name:20} {len(alone):3} runs, alone {_time(cost(alone, budget), budget, ratio, parallel)}",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
        for panel in figure.panels:
            if panel.why_not is not None:
                console.print(f"{'':20} {panel.spec.title}: not testable here: {panel.why_not}",
                              markup=False, soft_wrap=True)  # fmt: skip
    left = [run for run in total if run[0].key(run[1]) in missing]
    console.print(
        f"together: {len(total)} runs, {_time(cost(total, budget), budget, ratio, parallel)}; missing: "
        f"{len(left)} runs, {_time(cost(left, budget), budget, ratio, parallel)}. "
        "The paper trains with 100 tokens a parameter.",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip


def _time(amount: float, budget: Budget, ratio: float | None, parallel: int) -> str:
    if budget.gpu is not None:
        return f"{amount:,.1f} GPU-hours"
    minutes = amount * (ratio or 1.0) / 60 / parallel
    source = "as the budget estimates" if ratio is None else f"measured: {ratio:.2f} times the budget's estimate"
    return f"about {minutes:,.0f} min, {parallel} at a time, {source}"
