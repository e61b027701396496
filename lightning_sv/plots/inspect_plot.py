"""Figure of the scale vectors of one model by depth: their size, and relative to their matrices."""

from collections.abc import Mapping, Sequence
from itertools import chain, cycle
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from lightning_sv.interop.inspect import VectorStatistics
from lightning_sv.plots.style import (
    GREY,
    LINES,
    PALETTE,
    legend_below,
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

    def shown(self, vectors: Sequence[VectorStatistics]) -> list[VectorStatistics]:
        """Return the vectors of the role that have the value."""
        of_role = [vector for vector in vectors if self.role in ("", vector.role)]
        return [vector for vector in of_role if getattr(vector, self.value) is not None]


_PANELS = (
    _Panel("How large are input-side γ?", "mean of γ", "mean", "input", 1.0),
    _Panel("How large are output-side γ?", "mean of γ", "mean", "output", 1.0),
    _Panel("Is γ large next to its matrices?", "median of ln(γ² / ‖w‖²)", "balance"),
    _Panel("Do the branches of a norm scale channels alike?", "correlation of ln ‖w‖", "agreement"),
)


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
    vectors = list(chain.from_iterable(families.values()))
    panels = [panel for panel in _PANELS if panel.shown(vectors)]
    columns = 2 if len(panels) == 4 else len(panels)
    rows = len(panels) // columns
    figure = new_figure(columns, rows)
    every_axes = figure.subplots(rows, columns, squeeze=False).flat
    for axes, panel in zip(every_axes, panels, strict=True):
        _draw_panel(axes, panel, families, _layer_count(vectors))
    figure.suptitle(name, x=0.012, ha="left", fontsize=10, color=GREY)
    legend_below(figure, _legend_title(vectors))
    write_picture(figure, path)


def _legend_title(vectors: Sequence[VectorStatistics]) -> str:
    if any(vector.depth is None for vector in vectors):
        return "after the last layer: vectors outside the layers"
    return ""


def _layer_count(vectors: Sequence[VectorStatistics]) -> int:
    depths = [vector.depth for vector in vectors if vector.depth is not None]
    return max(depths, default=-1) + 1


def _draw_panel(
    axes: Axes, panel: _Panel, families: Mapping[str, Sequence[VectorStatistics]], n_layers: int
) -> None:
    """Draw one line per family; it has the same look in all panels."""
    axes.axhline(panel.rest, color=GREY, linewidth=1)
    looks = zip(cycle(_COLOURS), cycle(LINES), cycle(_MARKERS), strict=False)
    for (name, vectors), (colour, line, marker) in zip(families.items(), looks, strict=False):
        shown = panel.shown(vectors)
        if not shown:
            continue
        depths = [n_layers if vector.depth is None else vector.depth for vector in shown]
        heights = [getattr(vector, panel.value) for vector in shown]
        look: dict[str, Any] = {"color": colour, "linestyle": line, "marker": marker}
        axes.plot(depths, heights, markersize=4, label=name, **look)
    axes.set(xlabel="layer", xlim=(-0.5, n_layers + 0.5), ylabel=panel.unit, title=panel.title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    set_style(axes)
