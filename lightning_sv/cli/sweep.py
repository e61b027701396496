"""`lightning-sv sweep`: strategies over a grid of settings, and the optimum of each."""

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_sv.cli.names import resolve_names
from lightning_sv.cli.prepare import with_corpus
from lightning_sv.errors import ConfigError, expect
from lightning_sv.experiments.arms import Series
from lightning_sv.experiments.claims.claim_types import optimum_words
from lightning_sv.experiments.compare import default_out, free_out, sweep
from lightning_sv.experiments.kinds.base import LoadedPanel
from lightning_sv.experiments.run_store import RunStore, context_of
from lightning_sv.experiments.sources.from_cli import asked, one_budget, swept_figure
from lightning_sv.json_text import json_text
from lightning_sv.runs.job import LAUNCHER
from lightning_sv.settings.plain_parser import PlainParser, number
from lightning_sv.settings.yaml_file import leaves, parse_overrides

#: key that a sweep may vary -> option with its values; the first one that is set is across tables
AXES = {"model.optim.lr": "lr", "model.backbone.init_std": "init_std"}


def run(argv: list[str], *, launcher: Sequence[str] = LAUNCHER) -> int:
    """Parse the arguments of `sweep`, train, print losses and optima; return the exit code."""
    text = "Train strategies at all combinations of learning rates and initial stds, and fit the optimum of each. "
    text += "Other arguments are passed to `fit` of each run (--config, any key)."
    parser = PlainParser("sweep", text, json="Print the numbers as JSON on stdout.")
    parser.add_argument("--scale", nargs="+", required=True, help="Strategies, each with its own optimum.")
    parser.add_argument("--lr", nargs="+", type=float, default=[], help="Peak learning rates; an optimum needs three.")
    parser.add_argument("--init_std", nargs="+", type=float, default=[], help="Initial stds; an optimum needs three.")
    parser.add_argument("--seeds", type=number(int, 1, 1000), default=2, help="Runs per point, on seeds 100, 101, ...")
    parser.add_places("Output directory, also for runs; runs/sweep/MODEL-DATA/STRATEGIES by default.")
    options, rest = parser.parse_known_args(argv)
    shared = with_corpus(resolve_names(rest))
    axes = {key: values for key, name in AXES.items() if (values := getattr(options, name))}
    if not axes:
        raise ConfigError("sweep: --lr and --init_std are not set; expected several values for one of them.")
    for key, value in leaves(parse_overrides(shared, "sweep")[1]).items():
        expect(key not in axes, f"--{key}", value, f"no value, because --{AXES.get(key)} is set. Remove one of them.")
    shared += [word for key, values in axes.items() for word in (f"--{key}", str(values[0]))]  # needed to parse a run
    arms, budget, model, data = one_budget([asked(scale, "", None) for scale in dict.fromkeys(options.scale)], shared)
    figure = swept_figure(arms, axes, shared, options.seeds, model)
    progress = Console(stderr=True)
    progress.print(budget, markup=False, highlight=False, soft_wrap=True)
    default = default_out(figure, model.backbone.name, data.corpus.dir, "sweep")
    store = RunStore(options.out or default.parent, context_of(data), launcher)
    out = options.out or free_out(default, figure, store)
    command = shlex.join(["lightning-sv", "sweep", *argv])
    panel = sweep(figure, store, out, jobs=options.jobs, console=progress, command=command)
    if options.json:
        arms_json = [_arm_json(panel, series) for series in panel.series]
        more = {"warnings": list(panel.warnings), "report": str(out / "report.html")}
        print(json_text({"unit": "nats per token", "arms": arms_json, **more}))
        return 0
    console = Console()
    for series in panel.series:
        console.print(_losses(series, axes))
        console.print(_sentence(series, axes), markup=False, highlight=False, style="bold", soft_wrap=True)
    console.print(str(out / "report.html"), markup=False, highlight=False, soft_wrap=True)
    return 0


def _arm_json(panel: LoadedPanel, series: Series) -> dict[str, Any]:
    best, keys = series.optimum, list(panel.spec.axes)
    return {
        "scale": series.label,
        "points": [{**dict(zip(keys, arm.point, strict=True)), "losses": arm.losses.tolist()} for arm in series.arms],
        "optimum": {
            **dict(zip(keys, best.values, strict=True)),
            "factor": {key: math.exp(e) if e == e else None for key, e in zip(keys, best.errors, strict=True)},
            **{key: getattr(best, key) for key in ("loss", "se", "df", "why_not")},
        },
    }


def _losses(series: Series, axes: Mapping[str, Sequence[float]]) -> Table:
    """Return mean losses: one row per initial std, one column per learning rate, or one row for a single setting."""
    across, *down = axes
    means = {arm.point: float(arm.losses.mean()) for arm in series.arms}
    lowest = min(means.values())
    table = Table(title=escape(f"{series.label}: val loss, nats per token"), title_justify="left")
    table.add_column(" \\ ".join(AXES[key] for key in (*down, across)), no_wrap=True)
    for x in sorted(axes[across]):
        table.add_column(f"{x:g}", justify="right", no_wrap=True)
    for row in [(y,) for y in sorted(axes[down[0]])] if down else [()]:
        cells = [means.get((x, *row)) for x in sorted(axes[across])]
        shown = ["diverged" if m is None else f"[bold]{m:.4f}[/bold]" if m == lowest else f"{m:.4f}" for m in cells]
        table.add_row("".join(f"{y:g}" for y in row), *shown)
    return table


def _sentence(series: Series, axes: Iterable[str]) -> str:
    best = series.optimum
    error = "" if best.se is None else f" (standard error {best.se:.4f})"
    if best.se is None and not best.why_not:  # no degrees of freedom
        error = "; more seeds or values are needed for its standard error"
    return f"{optimum_words(series.label, best, axes)}: {best.loss:.4f} nats per token{error}."
