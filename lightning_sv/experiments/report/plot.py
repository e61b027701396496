"""Plots of arms: colours, lines, legend and files. A baseline is blue and solid in each."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from lightning_sv.experiments.arms import Arm, Series, baseline_first
from lightning_sv.plots import style

#: strategies that have the same colour in every figure; the others take free colours
_FIXED = {
    "llama": style.BLUE,
    "unified": style.VERMILLION,
    "hg+dnp+or+iwd": style.VERMILLION,
    "nop": style.PURPLE,
}
_FREE = (style.VERMILLION, style.GREEN, style.PURPLE, style.SKY, style.ORANGE)
#: label of the y axis of final losses
FINAL_LOSS = "final validation loss, nats per token"
_ArmOrSeries = TypeVar("_ArmOrSeries", Arm, Series)


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


class Drawing(NamedTuple):
    """Plots of a panel, and sentences on what they lack."""

    plots: Sequence[Plot] = ()
    notes: Sequence[str] = ()


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


def with_looks(arms: Sequence[_ArmOrSeries]) -> list[tuple[_ArmOrSeries, style.Look]]:
    """Return each arm, the baseline first, with its look; the baseline has that of llama."""
    ordered = baseline_first(arms)
    has_baseline = ordered[0].baseline
    names = [_look_name(arm, has_baseline=has_baseline) for arm in ordered]
    colours = _free_colours(names)
    lines = cycle(style.LINES[1:])
    looks: list[style.Look] = []
    for name in names:
        look = _next_look(name, colours, lines)
        if look in looks:  # cycles of one length repeat their pairs
            look = look._replace(line=next(lines))
        looks.append(look)
    return list(zip(ordered, looks, strict=True))


def _free_colours(names: Sequence[str]) -> Iterator[str]:
    """Return the colours that no strategy of these names has of its own, in a cycle."""
    taken = {_FIXED[name] for name in names if name in _FIXED}
    return cycle([colour for colour in _FREE if colour not in taken])


def _next_look(name: str, colours: Iterator[str], lines: Iterator[str]) -> style.Look:
    if name == "llama":
        return style.Look(_FIXED[name], "-")
    if name in _FIXED:
        return style.Look(_FIXED[name], next(lines))
    return style.Look(next(colours), next(lines))


def _look_name(arm: Arm | Series, *, has_baseline: bool) -> str:
    """Return the strategy whose look an arm has; llama loses its own to a different baseline."""
    if arm.baseline:
        return "llama"
    if has_baseline and arm.label == "llama":
        return "llama, not the baseline"
    return arm.label
