"""Figures of the theory: panels of lines, at most three per row."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from lightning_sv.plots.style import GREY, PALETTE, formula_style, new_figure, set_style, write_picture
from lightning_sv.theory.claims.base import Panel

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
    for axes, panel in zip(figure.subplots(rows, columns, squeeze=False).flat, panels, strict=False):
        _draw(axes, panel)
    for axes in figure.axes[len(panels) :]:
        axes.set_axis_off()
    write_picture(figure, path)


def _draw(axes: Axes, panel: Panel) -> None:
    if panel.level is not None:
        axes.axhline(panel.level, color=GREY, linewidth=1, zorder=1)
    for k, line in enumerate(panel.lines):
        colour = _COLOURS[k % len(_COLOURS)] if line.colour is None else PALETTE.get(line.colour, line.colour)
        label = line.label or None
        if line.marks:
            mark = _MARKS[k % len(_MARKS)]
            axes.plot(line.x, line.y, mark, color=colour, markersize=3, alpha=0.6, mew=0, label=label)
        else:
            axes.plot(line.x, line.y, color=colour, linestyle=_STYLES[k % len(_STYLES)], linewidth=1.8, label=label)
        if line.spread is not None:
            y = np.asarray(line.y)
            axes.fill_between(line.x, y - line.spread, y + line.spread, color=colour, alpha=0.2, linewidth=0)
    for axis in panel.scale:
        axes.set(**{f"{axis}scale": "log"})
    if panel.limits is not None:
        axes.set_ylim(*panel.limits)
    if panel.x_limits is not None:
        axes.set_xlim(*panel.x_limits)
    axes.set(xlabel=panel.x, ylabel=panel.y, title=panel.title)
    set_style(axes)
    if any(line.label for line in panel.lines):
        axes.legend(fontsize=8, loc="best", edgecolor="none", framealpha=0.9)
