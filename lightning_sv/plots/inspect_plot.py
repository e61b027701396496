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
#: last part of the name of a vector of our models -> side of its matrix
_SIDES = {"scale_in": "in", "scale_out": "out"}
#: more bands than this hide each other
_MOST_BANDS = 2


class _Panel(NamedTuple):
    title: str
    unit: str
    value: str  # attribute of `VectorStatistics`
    role: str = ""  # role of the vectors to show; "" for all
    rest: float = 0.0  # height of the reference line
    band: bool = False  # if True and kinds are few, a band has 5% to 95% of the entries

    def shows(self, vector: VectorStatistics) -> bool:
        """Return True for a vector of the role that has the value."""
        return self.role in ("", vector.role) and getattr(vector, self.value) is not None


_PANELS = (
    _Panel("How large are input-side γ?", "mean of γ", "mean", "input", 1.0, True),
    _Panel("How large are output-side γ?", "mean of γ", "mean", "output", 1.0, True),
    _Panel("Is γ large next to its matrices?", "median of ln(γ² / ‖w‖²)", "balance"),
    _Panel("Do the branches of a norm scale channels alike?", "correlation of ln ‖w‖", "agreement"),
)


class _Family(NamedTuple):
    """Vectors of one name, and their look in all panels."""

    name: str  # in the legend
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
    named = zip(legend_names(list(families)), families.values(), strict=True)
    looks = zip(named, cycle(_COLOURS), cycle(LINES), cycle(_MARKERS), strict=False)
    vectors = list(chain.from_iterable(families.values()))
    styled = [_Family(*family, colour, line, marker) for family, colour, line, marker in looks]
    panels = [panel for panel in _PANELS if any(map(panel.shows, vectors))]
    ticks = _depth_ticks(vectors)

    columns = 2 if len(panels) == 4 else len(panels)
    rows = len(panels) // columns
    figure = new_figure(columns, rows)
    lines: dict[str, Line2D] = {}
    every_axes = figure.subplots(rows, columns, squeeze=False).flat
    for axes, panel in zip(every_axes, panels, strict=True):
        for family_name, line in _draw_panel(axes, panel, styled, ticks).items():
            lines.setdefault(family_name, line)
    figure.suptitle(name, x=0.012, ha="left", fontsize=10, color=GREY)
    _add_legend(figure, lines, max(2, columns))
    write_picture(figure, path)


def _layer_count(vectors: Iterable[VectorStatistics]) -> int:
    depths = [row.depth for row in vectors if row.depth is not None]
    if not depths:
        return 0
    return max(depths) + 1


def legend_names(names: Sequence[str]) -> list[str]:
    """Return short names for a legend; names whose short names are equal stay as they are.

    >>> legend_names(["layers.*.attn.qkv.q_proj.scale_in", "head.lm_head.scale_out", "a.x", "b.x"])
    ['q in', 'head out', 'a.x', 'b.x']
    """
    short = [_short_name(name) for name in names]
    return [own if short.count(own) == 1 else name for own, name in zip(short, names, strict=True)]


def _short_name(name: str) -> str:
    """Return the matrix and the side of a vector of our models, or the last part of a name."""
    path, _, last = name.rpartition(".")
    if last not in _SIDES:
        return last
    matrix = path.rpartition(".")[2].removesuffix("_proj").removeprefix("lm_")
    return f"{matrix} {_SIDES[last]}"


class _DepthTicks(NamedTuple):
    """Ticks of the depth axis.

    Attributes:
        end: place of the vectors outside the layers, and the number of layers
        labels: place -> label
    """

    end: int
    labels: Mapping[int, str]


def _depth_ticks(vectors: Sequence[VectorStatistics]) -> _DepthTicks:
    """Return ticks at some layers, and one at the vectors outside the layers, if there are any."""
    end = _layer_count(vectors)
    layers = list(map(round, MaxNLocator(integer=True).tick_values(0, max(end - 1, 1))))
    outside = [row.name for row in vectors if row.depth is None]
    if not outside:
        return _DepthTicks(end, _labels_up_to(end - 1, layers))

    step = layers[1] - layers[0]
    labels = _labels_up_to(end - step, layers)  # leaves room for the text at `end`
    is_head = all(name.startswith("head.") for name in outside)
    labels[end] = "head" if is_head else "outside"
    return _DepthTicks(end, labels)


def _labels_up_to(last: int, layers: Sequence[int]) -> dict[int, str]:
    return {layer: str(layer) for layer in layers if 0 <= layer <= last}


def _draw_panel(
    axes: Axes, panel: _Panel, families: Sequence[_Family], ticks: _DepthTicks
) -> dict[str, Line2D]:
    """Draw one panel; return name -> line."""
    axes.axhline(panel.rest, color=GREY, linewidth=1)
    shown = [family for family in families if family.shown_in(panel)]
    has_bands = panel.band and len(shown) <= _MOST_BANDS
    lines = {}
    for family in shown:
        vectors = family.shown_in(panel)
        depths = [ticks.end if row.depth is None else row.depth for row in vectors]
        if has_bands:
            _draw_band(axes, depths, vectors, family.colour)
        lines[family.name] = _draw_family(axes, panel, family, depths)
    unit = f"{panel.unit}, with 5% to 95%" if has_bands else panel.unit
    axes.set(xlabel="layer", xlim=(-0.5, ticks.end + 0.5), ylabel=unit, title=panel.title)
    axes.set_xticks(list(ticks.labels), list(ticks.labels.values()))
    set_style(axes)
    return lines


def _draw_family(axes: Axes, panel: _Panel, family: _Family, depths: Sequence[int]) -> Line2D:
    vectors = family.shown_in(panel)
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


def _add_legend(figure: Figure, lines: Mapping[str, Line2D], columns: int) -> None:
    """Add a legend below the panels; the figure becomes higher by its rows."""
    rows = math.ceil(len(lines) / columns)
    figure.set_figheight(figure.get_figheight() + 0.22 * (1 + rows))
    figure.legend(
        list(lines.values()),
        list(lines),
        loc="outside lower left",
        ncols=columns,
        alignment="left",
        frameon=False,
        handlelength=3,
        fontsize=9,
    )
