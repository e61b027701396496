"""`lightning-sv sweep`: strategies over a grid of settings, and the optimum of each."""

import math
import shlex
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd
from rich.console import Console

from lightning_sv.cli.names import resolve_names
from lightning_sv.cli.prepare import prepare_for_run
from lightning_sv.errors import ConfigError
from lightning_sv.experiments.arms import Series
from lightning_sv.experiments.claims.claim_types import optimum_words
from lightning_sv.experiments.compare import output_of, sweep
from lightning_sv.experiments.kinds.base import LoadedPanel
from lightning_sv.experiments.sources.from_cli import (
    check_data,
    checked_data,
    parse_arm,
    request_arms,
    swept_figure,
    tokens_sentence,
)
from lightning_sv.runs.job import LAUNCHER
from lightning_sv.settings.overrides import parse_overrides
from lightning_sv.settings.plain_parser import PlainParser, number
from lightning_sv.settings.sections import leaves

#: key that a sweep may vary -> option with its values; the first one that is set is across tables
AXES = {"model.optim.lr": "lr", "model.backbone.init_std": "init_std"}


def run(argv: list[str], *, launcher: Sequence[str] = LAUNCHER) -> int:
    """Parse the arguments of `sweep`, train, print losses and optima; return the exit code."""
    options, rest = _parser().parse_known_args(argv)
    named = resolve_names(rest)
    axes = _axes(options, named.parseable)
    first_point = {key: values[0] for key, values in axes.items()}
    specs = [parse_arm(scale) for scale in dict.fromkeys(options.scale)]
    prepare_for_run(named, lambda words: checked_data(specs, words, first_point))
    arms = request_arms(specs, named.words, first_point)
    check_data(arms)
    figure = swept_figure(arms, axes, options.seeds)

    progress = Console(stderr=True)
    progress.print(tokens_sentence(arms), markup=False, highlight=False, soft_wrap=True)
    out, store = output_of(figure, arms[0].run, "sweep", options.out, launcher)
    command = shlex.join(["lightning-sv", "sweep", *argv])
    panel = sweep(figure, store, out, jobs=options.jobs, console=progress, command=command)
    _print_tables(panel, axes, out)
    return 0


def _parser() -> PlainParser:
    text = (
        "Train strategies at all combinations of learning rates and initial stds, and fit the "
        "optimum of each. Other arguments are passed to `fit` of each run: --model NAME, "
        "--config FILE, any key."
    )
    parser = PlainParser("sweep", text)
    parser.add_argument(
        "--scale", nargs="+", required=True, help="Strategies, each with its own optimum."
    )
    values = "%s; an optimum needs three."
    parser.add_argument(
        "--lr", nargs="+", type=float, default=[], help=values % "Peak learning rates"
    )
    parser.add_argument(
        "--init_std", nargs="+", type=float, default=[], help=values % "Initial stds"
    )
    parser.add_argument(
        "--seeds",
        type=number(int, 1, 1000),
        default=2,
        help="Runs per point, on seeds 100, 101, ...",
    )
    parser.add_places(
        "Output directory, also for runs; runs/sweep/MODEL-DATA/STRATEGIES by default."
    )
    return parser


def _axes(options: Namespace, words: Sequence[str]) -> dict[str, list[float]]:
    """Return key -> values of the settings that the sweep varies.

    Raises:
        ConfigError: there are none, or the words of all runs set one of them
    """
    axes = {}
    for key, name in AXES.items():
        values = getattr(options, name)
        if values:
            axes[key] = values
    if not axes:
        expected = "several values for one of them"
        raise ConfigError(f"sweep: --lr and --init_std are not set; expected {expected}.")
    _, keys = parse_overrides(words, "sweep")
    for key, value in leaves(keys).items():
        if key in axes:
            expected = f"no value, because --{AXES[key]} is set"
            raise ConfigError(f"--{key} is {value}; expected {expected}. Remove one of them.")
    return axes


def _print_tables(panel: LoadedPanel, axes: Mapping[str, Sequence[float]], out: Path) -> None:
    console = Console()
    for series in panel.series:
        heading = f"{series.label}: val loss, nats per token"
        table = _loss_table(series, axes).to_string()
        console.print(f"{heading}\n{table}", markup=False, highlight=False, soft_wrap=True)
        sentence = _optimum_sentence(series, axes)
        console.print(sentence, markup=False, highlight=False, style="bold", soft_wrap=True)
    for warning in panel.warnings:
        console.print(f"warning: {warning}", markup=False, style="yellow", soft_wrap=True)
    console.print(str(out / "report.html"), markup=False, highlight=False, soft_wrap=True)


def _loss_table(series: Series, axes: Mapping[str, Sequence[float]]) -> pd.DataFrame:
    """Return mean losses as texts: a column per learning rate, a row per initial std.

    A single setting has one row.
    """
    losses = {arm.point: f"{arm.losses.mean():.4f}" for arm in series.arms}
    values = [sorted(axis) for axis in axes.values()]
    points = pd.MultiIndex.from_product(values, names=[AXES[key] for key in axes])
    cells = pd.Series([losses.get(point, "diverged") for point in points], points)
    if len(axes) == 1:
        return cells.to_frame("val loss").T
    return cells.unstack(level=0)


def _optimum_sentence(series: Series, axes: Iterable[str]) -> str:
    """Return the optimal settings of an arm, their loss and its standard error."""
    best = series.optimum
    is_fitted = not best.why_not
    error = ""
    if not math.isnan(best.se):
        error = f" (standard error {best.se:.4f})"
    elif is_fitted:  # with no degrees of freedom left
        error = "; more seeds or values are needed for its standard error"
    optimum = optimum_words(series.label, best, axes)
    return f"{optimum}: {best.loss:.4f} nats per token{error}."
