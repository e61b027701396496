"""Pictures: one PNG of panels side by side, each panel described by data alone.

Colours are Okabe and Ito's, and every line has a style of its own, for colour-blind and grey readers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lightning_sv.theory.dual import Array

BLUE, VERMILLION, GREEN = "#0072B2", "#D55E00", "#009E73"
ORANGE, PURPLE, SKY, GREY = "#E69F00", "#CC79A7", "#56B4E9", "#555555"
COLOURS = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, GREY)
_STYLES = ("-", "--", "-.", ":", (0, (6, 2)), (0, (3, 1, 1, 1)), (0, (1, 1)))


@dataclass(frozen=True)
class Line:
    """Points (x, y), joined or as marks; with `spread`, a band of that half-width around them.

    Args:
        label: In the legend; "" for none.
        x: Abscissae.
        y: Ordinates.
        marks: Draw marks instead of a line.
        spread: Half-width of the band.
        colour: The next free one when None.
    """

    label: str
    x: Array | Sequence[float]
    y: Array | Sequence[float]
    marks: bool = False
    spread: Array | None = None
    colour: str | None = None


@dataclass(frozen=True)
class Panel:
    """Axes with a title that says the claim, and their lines.

    Args:
        title: What to see.
        x: Label of the abscissa, with its unit.
        y: Label of the ordinate, with its unit.
        lines: What is drawn.
        scale: Which axes are logarithmic.
        level: Height of a grey horizontal line: what the claim compares with.
        limits: Of the ordinate.
        x_limits: Of the abscissa.
    """

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    scale: Literal["", "x", "y", "xy"] = ""
    level: float | None = None
    limits: tuple[float, float] | None = None
    x_limits: tuple[float, float] | None = None


def draw(panels: Sequence[Panel], path: str | Path) -> None:
    """Write a PNG with at most three panels a row.

    Args:
        panels: At least one.
        path: The file; its folder is made.
    """
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    # a Figure of its own canvas, not pyplot: no global state, no display
    figure = Figure(figsize=(4.9 * columns, 4.1 * rows), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)  # type: ignore[union-attr, call-arg]
    for axes, panel in zip(figure.subplots(rows, columns, squeeze=False).flat, panels, strict=False):
        _draw_panel(axes, panel)
    for axes in figure.axes[len(panels) :]:
        axes.set_axis_off()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    if panel.level is not None:
        axes.axhline(panel.level, color=GREY, linewidth=1, zorder=1)
    for k, line in enumerate(panel.lines):
        colour = line.colour or COLOURS[k % len(COLOURS)]
        label = line.label or None
        if line.marks:
            axes.plot(line.x, line.y, "osD^v"[k % 5], color=colour, markersize=3, alpha=0.6, mew=0, label=label)
        else:
            axes.plot(line.x, line.y, color=colour, linestyle=_STYLES[k % len(_STYLES)], linewidth=1.8, label=label)
        if line.spread is not None:
            y = np.asarray(line.y)
            axes.fill_between(line.x, y - line.spread, y + line.spread, color=colour, alpha=0.2, linewidth=0)
    if "x" in panel.scale:
        axes.set_xscale("log")
    if "y" in panel.scale:
        axes.set_yscale("log")
    if panel.limits is not None:
        axes.set_ylim(*panel.limits)
    if panel.x_limits is not None:
        axes.set_xlim(*panel.x_limits)
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    if any(line.label for line in panel.lines):
        axes.legend(fontsize=8, loc="best", edgecolor="none", framealpha=0.9)
