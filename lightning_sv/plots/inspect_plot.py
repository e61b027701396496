"""Figure of the scale vectors of one model by depth: their size, and relative to their matrices."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, cycle
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from lightning_sv.interop.inspect import VectorStatistics
from lightning_sv.plots.style import (
    GREY,
    LINES,
    PALETTE,
    new_figure,
    plain_style,
    set_style,
    write_picture,
)

_COLOURS = list(PALETTE.values())[:-1]  # the reference line is grey
_MARKERS = "osv^D"


class _Panel(NamedTuple):
    title: str
    unit: str
    value: str  # attribute of `VectorStatistics`
    role: str = ""  # role of the vectors to show; "" for all
    rest: float = 0.0  # height of the reference line
    band: bool = False  # if True, also the range from 5% to 95% of the entries

    def shows(self, vector: VectorStatistics) -> bool:
        """Return True for a vector of the role that has the value."""
        return self.role in ("", vector.role) and getattr(vector, self.value) is not None


_PANELS = (
    _Panel("How large are input-side γ?", "γ, mean and 5% to 95%", "mean", "input", 1.0, True),
    _Panel("How large are output-side γ?", "γ, mean and 5% to 95%", "mean", "output", 1.0, True),
    _Panel("Is γ large next to its matrices?", "median of ln(γ² / ‖w‖²)", "balance"),
    _Panel("Do the branches of a norm scale channels alike?", "correlation of ln ‖w‖", "agreement"),
)


class _Family(NamedTuple):
    """Vectors of one name, and their look in all panels."""

    name: str
    vectors: Sequence[VectorStatistics]
    colour: str
    line: str
    marker: str

    def shown_in(self, panel: _Panel) -> list[VectorStatistics]:
        """Return the vectors that have a value in a panel."""
        return [row for row in self.vectors if panel.shows(row)]


@plain_style
def draw_vectors(
    name: str, families: Mapping[str, Sequence[VectorStatistics]], path: str | Path
) -> None:
    """Draw gamma and its balance with the matrices against depth, as PNG.

    Panels without a value are left out.

    Args:
        name: name of the model
        families: name without layer number -> vectors; those outside the layers are drawn after the
            last layer
        path: file to write
    """
    looks = zip(families.items(), cycle(_COLOURS), cycle(LINES), cycle(_MARKERS), strict=False)
    vectors = list(chain.from_iterable(families.values()))
    styled = [_Family(*family, colour, line, marker) for family, colour, line, marker in looks]
    panels = [panel for panel in _PANELS if any(map(panel.shows, vectors))]
    end = _layer_count(vectors)

    columns = 2 if len(panels) == 4 else len(panels)
    rows = len(panels) // columns
    figure = new_figure(columns, rows)
    lines: dict[str, Line2D] = {}
    every_axes = figure.subplots(rows, columns, squeeze=False).flat
    for axes, panel in zip(every_axes, panels, strict=True):
        for family_name, line in _draw_panel(axes, panel, styled, end).items():
            lines.setdefault(family_name, line)
    figure.suptitle(name, x=0.012, ha="left", fontsize=10, color=GREY)
    _add_legend(figure, lines, max(2, columns), f"those without a layer are drawn at {end}")
    write_picture(figure, path)


def _layer_count(vectors: Iterable[VectorStatistics]) -> int:
    depths = [row.depth for row in vectors if row.depth is not None]
    if not depths:
        return 0
    return max(depths) + 1


def _draw_panel(
    axes: Axes, panel: _Panel, families: Sequence[_Family], end: int
) -> dict[str, Line2D]:
    """Draw one panel; return name -> line."""
    axes.axhline(panel.rest, color=GREY, linewidth=1)
    lines = {}
    for family in families:
        vectors = family.shown_in(panel)
        if vectors:
            lines[family.name] = _draw_family(axes, panel, family, vectors, end)
    axes.set(xlabel="layer", xlim=(-0.5, end + 0.5), ylabel=panel.unit, title=panel.title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    set_style(axes)
    return lines


def _draw_family(
    axes: Axes, panel: _Panel, family: _Family, vectors: Sequence[VectorStatistics], end: int
) -> Line2D:
    depths = [end if row.depth is None else row.depth for row in vectors]
    if panel.band:
        _draw_band(axes, depths, vectors, family.colour)
    heights = [getattr(row, panel.value) for row in vectors]
    (line,) = axes.plot(depths, heights, family.line, color=family.colour, linewidth=1.6)
    line.set(marker=family.marker, markersize=4)
    return line


def _draw_band(
    axes: Axes, depths: Sequence[int], vectors: Sequence[VectorStatistics], colour: str
) -> None:
    """Draw the range of the entries; that of a single vector as a line."""
    low = [row.low for row in vectors]
    high = [row.high for row in vectors]
    if len(depths) > 1:
        axes.fill_between(depths, low, high, color=colour, alpha=0.1, linewidth=0)
    else:
        axes.vlines(depths, low, high, color=colour, alpha=0.3, linewidth=3)


def _add_legend(figure: Figure, lines: Mapping[str, Line2D], columns: int, title: str) -> None:
    """Add a legend below the panels; the figure becomes higher by its rows."""
    rows = math.ceil(len(lines) / columns)
    figure.set_figheight(figure.get_figheight() + 0.22 * (2 + rows))
    figure.legend(
        list(lines.values()),
        list(lines),
        loc="outside lower left",
        ncols=columns,
        alignment="left",
        frameon=False,
        handlelength=3,
        fontsize=9,
        title=title,
    )
