"""Figure of the scale vectors of one model by depth."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pandas as pd
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
    rows = []
    for family, vectors in families.items():
        rows += [(family, vector.role, vector.depth, vector.mean) for vector in vectors]
    table = pd.DataFrame(rows, columns=["family", "role", "depth", "mean"])
    n_layers = int(table["depth"].fillna(-1).max()) + 1
    table["depth"] = table["depth"].fillna(n_layers)
    looks = dict(zip(families, zip(cycle(_COLOURS), cycle(LINES), cycle(_MARKERS)), strict=False))

    roles = table.groupby("role")
    figure = new_figure(roles.ngroups, 1)
    every_axes = figure.subplots(1, roles.ngroups, squeeze=False).flat
    for axes, (role, shown) in zip(every_axes, roles, strict=True):
        axes.axhline(1.0, color=GREY, linewidth=1)  # the initial value
        for family, line in shown.groupby("family", sort=False):
            colour, dashes, marker = looks[str(family)]
            look: dict[str, Any] = {"color": colour, "linestyle": dashes, "marker": marker}
            axes.plot(line["depth"], line["mean"], markersize=4, label=family, **look)
        axes.set(xlabel="layer", xlim=(-0.5, n_layers + 0.5), ylabel="mean of γ")
        axes.set_title(_PANELS[str(role)])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        set_style(axes)
    figure.suptitle(name, x=0.012, ha="left", fontsize=10, color=GREY)
    legend_below(figure, "after the last layer: vectors outside the layers")
    write_picture(figure, path)
