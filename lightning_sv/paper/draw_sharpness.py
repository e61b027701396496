"""A figure from event files alone: the Hessian of the held-out loss along the runs of several arms."""

from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from lightning_sv.paper.events import Run
from lightning_sv.paper.figure import LINES, colours, new_figure, save
from lightning_sv.paper.stats import on_common_tokens

_FIGURES = {"lambda_max": "λmax", "trace": "trace", "fro2": "‖H‖² (Frobenius)"}
_PARTS = {
    "all": "all parameters",
    "scale_input": "Input-Norm scale vectors",
    "scale_output": "Output-Norm scale vectors",
}
_PREFIX = "sharpness/"


def has_sharpness(runs: Sequence[Run]) -> bool:
    """Whether every run logged the sharpness of some set of parameters."""
    return all(any(tag.startswith(_PREFIX) and tag.endswith("/lambda_max") for tag in run.curves) for run in runs)


def draw_sharpness(arms: Sequence[Sequence[Run]], path: str | Path, *, labels: Sequence[str]) -> None:
    """One row a set of parameters, one column a figure: mean over seeds, a thin line a seed, against training tokens.

    Args:
        arms: Runs of every arm, one per seed, that `has_sharpness`.
        path: The PNG to write.
        labels: Names of the arms.
    """
    first = arms[0][0].curves
    parts = list(dict.fromkeys(tag.split("/")[1] for tag in first if tag.startswith(_PREFIX) and tag.count("/") == 2))
    figure = new_figure(panels=len(_FIGURES))
    figure.set_figheight(3.2 * len(parts))
    grid = figure.subplots(len(parts), len(_FIGURES), squeeze=False)
    looks = list(zip(labels, colours(labels), islice(cycle(LINES), len(arms)), arms, strict=True))
    for row, part in zip(grid, parts, strict=True):
        for axes, (key, name) in zip(row, _FIGURES.items(), strict=True):
            for label, colour, style, runs in looks:
                curves = [run.curve(f"{_PREFIX}{part}/{key}") for run in runs]
                tokens, values = on_common_tokens(curves)
                later = tokens > 0  # the axis is logarithmic, as the probes are
                for seed in values if len(curves) > 1 else []:
                    axes.plot(tokens[later], seed[later], color=colour, linewidth=0.7, alpha=0.45)
                axes.plot(tokens[later], values.mean(0)[later], style, color=colour, linewidth=2, label=label)
                if key != "trace" and np.all(values > 0) and axes.get_yscale() == "linear":
                    axes.set_yscale("log")
            axes.set_title(f"{name}: {_PARTS.get(part, part)}")
    seeds = f"mean of {len(arms[0])} seeds" if len(arms[0]) > 1 else "one seed"
    lines, names = grid[0][0].get_legend_handles_labels()
    where: dict[str, Any] = {"loc": "outside lower left", "ncols": len(names), "alignment": "left"}
    figure.legend(
        lines, names, frameon=False, title=f"Hessian H of the held-out loss, {seeds}", handlelength=3, **where
    )
    save(figure, path, tokens="log")
