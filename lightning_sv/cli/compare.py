"""`lightning-sv compare` and `sweep`: strategies in pairs with a baseline; each over a grid of its settings."""

import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_sv import __version__
from lightning_sv.experiments.compare import compare, default_out
from lightning_sv.experiments.compare import sweep as run_sweep
from lightning_sv.experiments.results import Panel, Series
from lightning_sv.experiments.runs import Runs
from lightning_sv.experiments.sources.compared import (
    asked,
    check_different,
    compared_figure,
    one_budget,
    resolve,
    swept_figure,
)
from lightning_sv.runs.job import LAUNCHER
from lightning_sv.settings.data import Batches
from lightning_sv.settings.plain_parser import PlainParser

#: what a sweep varies, across first
AXES = ("model.optim.lr", "model.backbone.init_std")


def run(argv: list[str], *, launcher: Sequence[str] = LAUNCHER) -> int:
    """Parse the arguments of `compare`, run it, show the result; return the exit code.

    Args:
        argv: on the command line after `compare`
        launcher: the program that trains one run

    Raises:
        ValueError: what makes no comparison, or what `fit` would refuse
    """
    parser = PlainParser(
        prog="lightning-sv compare",
        description="Train a baseline A and one or several other strategies on the same seeds and data order, and "
        "compare each of them with A in pairs. Arguments that are not listed here go to `fit` of every arm "
        "(--config, any key).",
    )
    parser.add_argument("--a", required=True, help="Strategy compared with, usually llama.")
    parser.add_argument("--b", required=True, nargs="+", help="Strategies in question, each compared with A.")
    parser.add_argument("--seeds", type=int, default=3, help="Number of seeds, each a run of every arm.")
    parser.add_argument("--a_args", default="", help='Arguments of A alone, e.g. "--model.backbone.init_std 0.03".')
    parser.add_argument("--b_args", default="", help="Arguments of every B, not of A.")
    parser.add_argument("--a_label", help="Name of A in table and chart; the strategy by default.")
    parser.add_argument("--b_label", nargs="+", help="Names of the B, one each, in their order.")
    parser.add_argument("--out", help="Directory, of its runs too; runs/compare/MODEL-DATA/A_vs_B_B... by default.")
    parser.add_argument("--jobs", type=int, help="Runs at a time; one a core, four at most, by default.")
    parser.add_argument("--json", action="store_true", help="Print the figures as JSON on stdout.")
    options, shared = parser.parse_known_args(argv)
    a = asked(options.a, options.a_args, options.a_label)
    labels = options.b_label or [None] * len(options.b)
    if len(labels) != len(options.b):
        raise ValueError(f"--b names {len(options.b)} strategies and --b_label {len(labels)}; give one label each.")
    others = [asked(scale, options.b_args, label) for scale, label in zip(options.b, labels, strict=True)]
    runs = resolve([a, *others], shared)
    check_different(runs)
    arms, budget = one_budget(runs)
    figure = compared_figure(arms, shared, options.seeds)
    Console(stderr=True).print(budget, markup=False, highlight=False, soft_wrap=True)
    out = Path(options.out) if options.out else default_out(figure, runs[0].model.config.name, runs[0].data.corpus.dir)
    # a directory that is asked for has its runs in it; all others share theirs
    had = Runs(out if options.out else out.parent, _context(runs[0].data), launcher)
    command = shlex.join(["lightning-sv", "compare", *argv])
    result = compare(figure, had, out, jobs=options.jobs, command=command)
    if options.json:
        print(result.to_json())
    else:
        result.print(Console())
    return 0


def sweep(argv: list[str], *, launcher: Sequence[str] = LAUNCHER) -> int:
    """Parse the arguments of `sweep`, run it, show losses and optima; return the exit code.

    Args:
        argv: on the command line after `sweep`
        launcher: the program that trains one run

    Raises:
        ValueError: what makes no grid, or what `fit` would refuse
    """
    parser = PlainParser(
        prog="lightning-sv sweep",
        description="Train strategies at every combination of some learning rates and initial standard deviations, and "
        "fit where the loss of each is lowest. Arguments that are not listed here go to `fit` of every run (--config, "
        "any key).",
    )
    parser.add_argument("--scale", nargs="+", required=True, help="Strategies, each with an optimum of its own.")
    parser.add_argument("--lr", nargs="+", type=float, default=[], help="Peak learning rates; three or more.")
    parser.add_argument("--init_std", nargs="+", type=float, default=[], help="Initial stds; three or more.")
    parser.add_argument("--seeds", type=int, default=2, help="Runs of every point, on seeds 100, 101, ...")
    parser.add_argument("--out", help="Directory, of its runs too; runs/sweep/MODEL-DATA/STRATEGIES by default.")
    parser.add_argument("--jobs", type=int, help="Runs at a time; one a core, four at most, by default.")
    parser.add_argument("--json", action="store_true", help="Print the figures as JSON on stdout.")
    options, shared = parser.parse_known_args(argv)
    axes = {key: values for key, values in zip(AXES, (options.lr, options.init_std), strict=True) if values}
    if not axes:
        raise ValueError("sweep: there is nothing to vary; give --lr, --init_std, or both, with their values.")
    shared += [word for key, values in axes.items() for word in (f"--{key}", str(values[0]))]  # a run needs some
    runs = resolve([asked(scale, "", None) for scale in dict.fromkeys(options.scale)], shared)
    check_different(runs)
    arms, budget = one_budget(runs)
    figure = swept_figure(arms, axes, shared, options.seeds, runs[0].model)
    said = Console(stderr=True)
    said.print(budget, markup=False, highlight=False, soft_wrap=True)
    where = default_out(figure, runs[0].model.config.name, runs[0].data.corpus.dir, "sweep")
    out = Path(options.out) if options.out else where
    had = Runs(out if options.out else out.parent, _context(runs[0].data), launcher)
    command = shlex.join(["lightning-sv", "sweep", *argv])
    panel = run_sweep(figure, had, out, jobs=options.jobs, console=said, command=command)
    found = [_swept(panel, series) for series in panel.series]
    if options.json:
        print(json.dumps({"unit": "nats per token", "arms": found, "report": str(out / "report.html")}, indent=2))
        return 0
    console = Console()
    for arm in found:
        console.print(_losses(arm, axes))
        console.print(_sentence(arm), markup=False, highlight=False, style="bold", soft_wrap=True)
    console.print(str(out / "report.html"), markup=False, highlight=False, soft_wrap=True)
    return 0


def _swept(panel: Panel, series: Series) -> dict[str, Any]:
    """Every loss of an arm and its optimum; plain JSON types."""
    best, keys = panel.optimum(series), list(panel.spec.axes)
    points = [
        {**dict(zip(keys, point, strict=True)), "losses": losses.tolist()}
        for point, losses in zip(series.points, panel.losses(series), strict=True)
    ]
    return {
        "scale": series.label,
        "points": points,
        "optimum": {
            **dict(zip(keys, best.values, strict=True)),
            "factor": {key: math.exp(e) if e == e else None for key, e in zip(keys, best.errors, strict=True)},
            "loss": best.loss,
            "se": best.se,
            "df": best.df,
            "why_not": best.why_not,
        },
    }


def _losses(arm: dict[str, Any], axes: dict[str, list[float]]) -> Table:
    """Mean losses: a row an initial std, a column a learning rate, or one row of the only setting."""
    *down, across = reversed(axes)
    means = {tuple(p[key] for key in (*down, across)): float(np.mean(p["losses"])) for p in arm["points"]}
    rows, columns = sorted(axes[down[0]]) if down else [0.0], sorted(axes[across])
    lowest = min(means.values())
    table = Table(title=escape(f"{arm['scale']}: val loss, nats per token"), title_justify="left")
    table.add_column(f"{_short(down[0])} \\ {_short(across)}" if down else _short(across), no_wrap=True)
    for x in columns:
        table.add_column(f"{x:g}", justify="right", no_wrap=True)
    for row in rows:
        cells = [means.get((row, x) if down else (x,)) for x in columns]
        shown = ["diverged" if m is None else f"[bold]{m:.4f}[/bold]" if m == lowest else f"{m:.4f}" for m in cells]
        table.add_row(f"{row:g}" if down else "", *shown)
    return table


def _sentence(arm: dict[str, Any]) -> str:
    best = arm["optimum"]
    at = [f"{_short(key)} {best[key]:.3g}" for key in best["factor"]]
    if best["why_not"]:
        return f"{arm['scale']} has no fitted optimum: {best['why_not']}, {best['loss']:.4f} at {' and '.join(at)}."
    if best["se"] is None:  # as many points as the fit has numbers
        error = "; more seeds or values would say how sure that is"
    else:
        at = [
            f"{words} (times or over {best['factor'][key]:.2f})" for words, key in zip(at, best["factor"], strict=True)
        ]
        error = f" (standard error {best['se']:.4f})"
    return f"{arm['scale']} is lowest at {' and '.join(at)}: {best['loss']:.4f} nats per token{error}."


def _short(key: str) -> str:
    return key.rpartition(".")[2]


def _context(data: Batches) -> dict[str, str]:
    """What the results depend on beside the commands of the runs."""
    return {"corpus_hash": data.manifest.corpus_hash, "torch": torch.__version__, "lightning_sv": __version__}
