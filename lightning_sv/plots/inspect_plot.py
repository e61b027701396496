"""Figure of the scale vectors of one model by depth: their size on either side, and relative to their matrices."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from lightning_sv.interop.inspect import VectorStatistics
from lightning_sv.plots.style import GREY, LINES, PALETTE, new_figure, plain_style, set_style, write_picture

_COLOURS = list(PALETTE.values())[:-1]  # the reference line is grey
_MARKERS = "osv^D"


class _Panel(NamedTuple):
    title: str
    unit: str
    value: Callable[[VectorStatistics], float | None]
    role: str = ""  # role of the vectors to show; "" for all
    rest: float = 0.0  # height of the reference line
    band: bool = False  # if True, also the range from 5% to 95% of the entries


_PANELS = (
    _Panel("How large are input-side γ?", "γ, mean and 5% to 95%", lambda row: row.mean, "input", 1.0, True),
    _Panel("How large are output-side γ?", "γ, mean and 5% to 95%", lambda row: row.mean, "output", 1.0, True),
    _Panel("Is γ large next to its matrices?", "median of ln(γ² / ‖w‖²)", lambda row: row.balance),
    _Panel("Do the branches of a norm scale channels alike?", "correlation of ln ‖w‖", lambda row: row.agreement),
)


@plain_style
def draw_vectors(name: str, families: Mapping[str, Sequence[VectorStatistics]], path: str | Path) -> None:
    """Draw gamma and its balance with the matrices against depth, as PNG; panels without a value are left out.

    `families` maps names without layer numbers to vectors; those outside the layers are drawn after the last layer.
    """
    there = [(panel, rows) for panel in _PANELS if (rows := _of(families, panel))]
    columns = 2 if len(there) == 4 else len(there)
    figure = new_figure(columns, len(there) // columns)
    styles = dict(zip(families, zip(cycle(_COLOURS), cycle(LINES), cycle(_MARKERS), strict=False), strict=False))
    end = max((row.depth for rows in families.values() for row in rows if row.depth is not None), default=-1) + 1
    lines: dict[str, Any] = {}
    every_axes = figure.subplots(len(there) // columns, columns, squeeze=False).flat
    for axes, (panel, rows) in zip(every_axes, there, strict=True):
        axes.axhline(panel.rest, color=GREY, linewidth=1)
        for family, vectors in rows.items():
            lines.setdefault(family, _draw(axes, panel, vectors, styles[family], end))
        axes.set(xlabel="layer", xlim=(-0.5, end + 0.5), ylabel=panel.unit, title=panel.title)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        set_style(axes)
    figure.suptitle(name, x=0.012, ha="left", fontsize=10, color=GREY)
    names_per_row = max(2, columns)
    figure.set_figheight(figure.get_figheight() + 0.22 * (2 + math.ceil(len(lines) / names_per_row)))
    figure.legend(
        list(lines.values()), list(lines), loc="outside lower left", ncols=names_per_row, alignment="left",
        frameon=False, handlelength=3, fontsize=9, title=f"those without a layer are drawn at {end}",
    )  # fmt: skip
    write_picture(figure, path)


def _of(families: Mapping[str, Sequence[VectorStatistics]], panel: _Panel) -> dict[str, list[VectorStatistics]]:
    """Return the vectors that have a value in a panel."""
    kept = {
        family: [row for row in rows if panel.role in ("", row.role) and panel.value(row) is not None]
        for family, rows in families.items()
    }
    return {family: rows for family, rows in kept.items() if rows}


def _draw(axes: Axes, panel: _Panel, vectors: Sequence[VectorStatistics], style: tuple[str, str, str], end: int) -> Any:
    """Draw the vectors of one family; return the line."""
    colour, line, marker = style
    at = [end if row.depth is None else row.depth for row in vectors]
    low, high = [row.low for row in vectors], [row.high for row in vectors]
    if panel.band and len(at) > 1:
        axes.fill_between(at, low, high, color=colour, alpha=0.1, linewidth=0)
    elif panel.band:
        axes.vlines(at, low, high, color=colour, alpha=0.3, linewidth=3)
    heights: list[Any] = [panel.value(row) for row in vectors]
    (drawn,) = axes.plot(at, heights, line, marker=marker, markersize=4, color=colour, linewidth=1.6)
    return drawn
