"""Plots of arms: colours, lines, legend and files. A baseline is blue and solid in each."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from lightning_sv.experiments.arms import ArmOrSeries, baseline_first
from lightning_sv.plots import style

# colours of arms other than the first; three lines and five colours, so that pairs repeat late
_COLOURS = (style.VERMILLION, style.GREEN, style.PURPLE, style.SKY, style.ORANGE)
#: label of the y axis of final losses
FINAL_LOSS = "final validation loss, nats per token"


class Plot(NamedTuple):
    """A plot: a name for its file, alternative text, the figure."""

    name: str
    alt: str
    figure: Figure

    def save(self, stem: Path) -> None:
        """Write `stem`.png and `stem`.svg; equal figures have equal bytes."""
        stem.parent.mkdir(parents=True, exist_ok=True)
        with rc_context({"svg.hashsalt": "lightning_sv"}):
            self.figure.savefig(f"{stem}.svg", metadata={"Date": None})
            self.figure.savefig(f"{stem}.png")


def finished(name: str, alt: str, axes: Axes, legend: str) -> Plot:
    """Style the axes, add the legend, and return the plot; its text ends with the lines' names."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    style.set_style(axes)
    style.legend_below(figure, legend)
    names = axes.get_legend_handles_labels()[1]
    return Plot(name, f"{alt}: {'; '.join(names)}", figure)


def draw_losses(
    axes: Axes, losses: Mapping[float, NDArray[np.float64]], look: style.Look, **line: Any
) -> None:
    """Draw a point at the mean of each place's losses (seeds,), and a dot per seed."""
    for place, seeds in losses.items():
        places = np.full(len(seeds), place)
        axes.plot(places, seeds, ".", color=look.colour, alpha=0.45, markersize=5)
    means = [seeds.mean() for seeds in losses.values()]
    axes.plot(list(losses), means, color=look.colour, marker="o", **line)


def with_looks(arms: Sequence[ArmOrSeries]) -> list[tuple[ArmOrSeries, style.Look]]:
    """Return each arm with its look, the baseline first; the first one is blue and solid."""
    first, *others = baseline_first(arms)
    looks: map[style.Look] = map(style.Look, cycle(_COLOURS), cycle(style.LINES[1:]))
    return [(first, style.Look(style.BLUE, "-")), *zip(others, looks, strict=False)]
