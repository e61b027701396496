"""Figure of the scale vectors of one model by depth."""

from collections.abc import Mapping, Sequence
from itertools import chain, cycle
from pathlib import Path
from typing import Any

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


#: role of the vectors of a panel -> its title
_PANELS = {"input": "How large are input-side γ?", "output": "How large are output-side γ?"}


@plain_style
def draw_vectors(
    name: str, families: Mapping[str, Sequence[VectorStatistics]], path: str | Path
) -> None:
    """Draw the mean of gamma against depth, as PNG; a role without vectors has no panel.

    Args:
        name: name of the model
        families: name without layer number -> vectors; those outside the layers are drawn after the
            last layer
        path: file to write
    """
    vectors = list(chain.from_iterable(families.values()))
    found = {vector.role for vector in vectors}
    roles = [role for role in _PANELS if role in found]
    figure = new_figure(len(roles), 1)
    every_axes = figure.subplots(1, len(roles), squeeze=False).flat
    depths = [vector.depth for vector in vectors if vector.depth is not None]
    n_layers = max(depths, default=-1) + 1
    for axes, role in zip(every_axes, roles, strict=True):
        _draw_panel(axes, role, families, n_layers)
    figure.suptitle(name, x=0.012, ha="left", fontsize=10, color=GREY)
    legend_below(figure, "after the last layer: vectors outside the layers")
    write_picture(figure, path)


def _draw_panel(
    axes: Axes, role: str, families: Mapping[str, Sequence[VectorStatistics]], n_layers: int
) -> None:
    """Draw one line per family; it has the same look in all panels."""
    axes.axhline(1.0, color=GREY, linewidth=1)  # the initial value
    looks = zip(cycle(_COLOURS), cycle(LINES), cycle(_MARKERS), strict=False)
    for (name, vectors), (colour, line, marker) in zip(families.items(), looks, strict=False):
        shown = [vector for vector in vectors if vector.role == role]
        if not shown:
            continue
        depths = [n_layers if vector.depth is None else vector.depth for vector in shown]
        means = [vector.mean for vector in shown]
        look: dict[str, Any] = {"color": colour, "linestyle": line, "marker": marker}
        axes.plot(depths, means, markersize=4, label=name, **look)
    axes.set(xlabel="layer", xlim=(-0.5, n_layers + 0.5), ylabel="mean of γ", title=_PANELS[role])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    set_style(axes)
