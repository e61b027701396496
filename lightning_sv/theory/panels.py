"""Plots as data: panels of lines, rendered elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_sv.theory.dual import Array

#: label of the x axis of most panels
TIME = "time t of the flow"
Colour = Literal["blue", "vermillion", "green", "orange", "purple", "sky", "grey", "black"]


@dataclass(frozen=True)
class Line:
    """Points (x, y) as a line or marks, with an optional band of half-width `spread`.

    Args:
        label: label in the legend; "" for none
        x: x values, shape (N,)
        y: y values, shape (N,)
        marks: if True, marks instead of a line
        spread: half-width of the band, shape (N,)
        colour: colour; None for the next unused one
    """

    label: str
    x: Array | Sequence[float]
    y: Array | Sequence[float]
    marks: bool = False
    spread: Array | None = None
    colour: Colour | None = None


@dataclass(frozen=True)
class Panel:
    """Axes with a title and their lines.

    Args:
        title: statement that the plot shows
        x: label of the x axis, with its unit
        y: label of the y axis, with its unit
        lines: at least one line
        scale: logarithmic axes
        level: height of a grey horizontal reference line
        limits: limits of the y axis
        x_limits: limits of the x axis
    """

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    scale: Literal["", "x", "y", "xy"] = ""
    level: float | None = None
    limits: tuple[float, float] | None = None
    x_limits: tuple[float, float] | None = None


def ratio_panel(title: str, ours: str, theirs: str, lines: Sequence[Line], limits: tuple[float, float]) -> Panel:
    """Return log-log axes for L_ours(t) / L_theirs(t), with TeX indices that may be empty."""
    upper, lower = (f"L_{{{index}}}(t)" if index else "L(t)" for index in (ours, theirs))
    return Panel(title, TIME, f"${upper} \\,/\\, {lower}$", lines, scale="xy", level=1.0, limits=limits)
