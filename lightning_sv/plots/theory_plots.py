"""Figures of the theory: panels of lines, at most three per row."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from lightning_sv.plots.style import (
    GREY,
    PALETTE,
    formula_style,
    new_figure,
    set_style,
    write_picture,
)
from lightning_sv.theory.claims.base import Line, Panel

_COLOURS = tuple(PALETTE.values())
# one style per colour, because some panels have more lines than `style.LINES` has styles
_STYLES = ("-", "--", "-.", ":", (0, (6, 2)), (0, (3, 1, 1, 1)), (0, (1, 1)))
_MARKS = "osD^v"


@formula_style
def draw_panels(panels: Sequence[Panel], path: str | Path) -> None:
    """Write a PNG with at most three panels per row."""
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure = new_figure(columns, rows)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)  # titles are sentences
    every_axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, panel in zip(every_axes, panels, strict=False):
        _draw_panel(axes, panel)
    for axes in every_axes[len(panels) :]:
        axes.set_axis_off()
    write_picture(figure, path)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    if panel.level is not None:
        axes.axhline(panel.level, color=GREY, linewidth=1, zorder=1)
    for place, line in enumerate(panel.lines):
        _draw_line(axes, line, place)
    for axis in panel.scale:
        axes.set(**{f"{axis}scale": "log"})
    axes.set(xlim=panel.x_limits, ylim=panel.limits)  # None leaves them to matplotlib
    axes.set(xlabel=panel.x, ylabel=panel.y, title=panel.title)
    set_style(axes)
    if any(line.label for line in panel.lines):
        axes.legend(fontsize=8, loc="best", edgecolor="none", framealpha=0.9)


def _draw_line(axes: Axes, line: Line, place: int) -> None:
    """Draw a line or marks in the look of its place, and its band."""
    colour = _COLOURS[place % len(_COLOURS)]
    if line.colour is not None:
        colour = PALETTE.get(line.colour, line.colour)
    label = line.label or None
    if line.marks:
        mark = _MARKS[place % len(_MARKS)]
        axes.plot(line.x, line.y, mark, color=colour, markersize=3, alpha=0.6, mew=0, label=label)
    else:
        dashes = _STYLES[place % len(_STYLES)]
        axes.plot(line.x, line.y, color=colour, linestyle=dashes, linewidth=1.8, label=label)
    if line.spread is not None:
        y = np.asarray(line.y)
        low = y - line.spread
        axes.fill_between(line.x, low, y + line.spread, color=colour, alpha=0.2, linewidth=0)
