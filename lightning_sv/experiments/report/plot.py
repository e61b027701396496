"""Plots of arms: colours, lines, legend and files. A baseline is blue and solid in each."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import NamedTuple, TypeVar

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_sv.experiments.arms import Arm, Series
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


def finished(name: str, alt: str, axes: Axes, legend: str) -> Plot:
    """Style the axes, add the legend, and return the plot; its text ends with the lines' names."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    style.set_style(axes)
    style.legend_below(figure, axes, legend)
    names = axes.get_legend_handles_labels()[1]
    return Plot(name, f"{alt}: {'; '.join(names)}", figure)


def with_looks(arms: Sequence[_ArmOrSeries]) -> list[tuple[_ArmOrSeries, style.Look]]:
    """Return each arm, the baseline first, with its look; the baseline has that of llama."""
    ordered = sorted(arms, key=lambda arm: not arm.baseline)
    has_baseline = ordered[0].baseline
    names = [_look_name(arm, has_baseline=has_baseline) for arm in ordered]
    taken = {_FIXED[name] for name in names if name in _FIXED}
    colours = cycle([colour for colour in _FREE if colour not in taken])
    lines = cycle(style.LINES[1:])
    looks: list[style.Look] = []
    for name in names:
        colour = _FIXED[name] if name in _FIXED else next(colours)
        line = "-" if name == "llama" else next(lines)
        if (colour, line) in looks:  # three colours and three lines come again together
            line = next(lines)
        looks.append(style.Look(colour, line))
    return list(zip(ordered, looks, strict=True))


def _look_name(arm: Arm | Series, *, has_baseline: bool) -> str:
    """Return the strategy whose look an arm has; llama loses its own to a different baseline."""
    if arm.baseline:
        return "llama"
    if has_baseline and arm.label == "llama":
        return "llama, not the baseline"
    return arm.label
