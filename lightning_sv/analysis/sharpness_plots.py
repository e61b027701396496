"""Figure and table of the Hessian of the held-out loss along the runs of several arms."""

from collections.abc import Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.lines import Line2D

from lightning_sv.analysis.paired import on_one_grid
from lightning_sv.analysis.style import LINES, colours, draw_seeds, new_figure, plain_style, save
from lightning_sv.runs.events import Run

_FIGURES = {"lambda_max": "λmax", "trace": "trace", "fro2": "‖H‖² (Frobenius)"}
_PARTS = {
    "all": "all parameters",
    "scale_input": "Input-Norm scale vectors",
    "scale_output": "Output-Norm scale vectors",
}
_PREFIX = "sharpness/"


def has_sharpness(runs: Sequence[Run]) -> bool:
    """Return whether every run logged the sharpness of some set of parameters."""
    return all(_parts([[run]]) for run in runs)


def sharpness_rows(arms: Sequence[Sequence[Run]], labels: Sequence[str]) -> list[dict[str, object]]:
    """Return one row per logged value."""
    rows: list[dict[str, object]] = []
    for label, runs in zip(labels, arms, strict=True):
        for run, part, key in product(runs, _parts(arms), _FIGURES):
            tag = f"{_PREFIX}{part}/{key}"
            if tag in run.curves and f"{tag}_error" in run.curves:
                where = {"arm": label, "seed": run.config.get("seed_everything"), "parameters": part, "figure": key}
                for tokens, value, error in zip(*run.curve(tag), run.curve(f"{tag}_error").values, strict=True):
                    measured = {"tokens": int(tokens), "value": f"{value:.6g}", "error": f"{error:.3g}"}
                    rows.append({**where, **measured})
    return rows


@plain_style
def draw_sharpness(arms: Sequence[Sequence[Run]], path: str | Path, *, labels: Sequence[str]) -> None:
    """Draw one row per set of parameters and one column per metric: mean over seeds and each seed against tokens.

    A panel shows the arms that have such parameters; `nop` has no scale vectors.
    """
    parts = _parts(arms)
    figure = new_figure(panels=len(_FIGURES))
    figure.set_figheight(3.2 * len(parts))
    grid = figure.subplots(len(parts), len(_FIGURES), squeeze=False)
    looks = list(zip(labels, zip(colours(labels), cycle(LINES), strict=False), arms, strict=True))
    shown: dict[str, Line2D] = {}
    for (i, part), (j, (key, name)) in product(enumerate(parts), enumerate(_FIGURES.items())):
        axes, tag, everything = grid[i][j], f"{_PREFIX}{part}/{key}", []
        for label, look, runs in looks:
            if not all(tag in run.curves for run in runs):
                continue
            tokens, values = on_one_grid([run.curve(tag) for run in runs])
            tokens, values = tokens[tokens > 0], values[:, tokens > 0]  # the axis is logarithmic
            shown[label] = draw_seeds(axes, tokens, values, values.mean(0), look, marker="o", markersize=3)
            everything.append(values)
        if key != "trace" and all(np.all(values > 0) for values in everything):
            axes.set_yscale("log")
        axes.set_title(f"{name}: {_PARTS.get(part, part)}")
    seeds = f"mean of {len(arms[0])} seeds" if len(arms[0]) > 1 else "one seed"
    where: dict[str, Any] = {"loc": "outside lower left", "ncols": len(shown), "alignment": "left", "handlelength": 3}
    title = f"Hessian H of the held-out loss, {seeds}"
    figure.legend(list(shown.values()), list(shown), frameon=False, title=title, **where)
    save(figure, path, tokens="log")


def _parts(arms: Sequence[Sequence[Run]]) -> list[str]:
    """Return the sets of parameters that any run has logged."""
    tags = (tag for runs in arms for run in runs for tag in run.curves)
    return list(dict.fromkeys(t.split("/")[1] for t in tags if t.startswith(_PREFIX) and t.endswith("/lambda_max")))
