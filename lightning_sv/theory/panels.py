"""Pictures as data: panels of lines, drawn elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_sv.theory.dual import Array

#: label of the abscissa of most panels
TIME = "time t of the flow"
Colour = Literal["blue", "vermillion", "green", "orange", "purple", "sky", "grey", "black"]


@dataclass(frozen=True)
class Line:
    """Points (x, y), joined or as marks; with `spread`, a band of that half-width around them.

    Args:
        label: in the legend; "" for none
        x: abscissae, shape (N,)
        y: ordinates, shape (N,)
        marks: marks instead of a line
        spread: half-width of the band, shape (N,)
        colour: the next free one when None
    """

    label: str
    x: Array | Sequence[float]
    y: Array | Sequence[float]
    marks: bool = False
    spread: Array | None = None
    colour: Colour | None = None


@dataclass(frozen=True)
class Panel:
    """Axes with a title that says the claim, and their lines.

    Args:
        title: what to see
        x: label of the abscissa, with its unit
        y: label of the ordinate, with its unit
        lines: at least one
        scale: which axes are logarithmic
        level: height of a grey horizontal line: what the claim compares with
        limits: of the ordinate
        x_limits: of the abscissa
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
    """Return axes for L_ours(t) / L_theirs(t), both logarithmic, where an index is TeX and may be empty."""
    upper, lower = (f"L_{{{index}}}(t)" if index else "L(t)" for index in (ours, theirs))
    return Panel(title, TIME, f"${upper} \\,/\\, {lower}$", lines, scale="xy", level=1.0, limits=limits)
