"""Shared style of all figures: colours, limits, token counts as text, files.

Colours are those of Okabe and Ito, which colour-blind readers can distinguish; a baseline is always
blue.
"""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import TextWrapper
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib import rc_context, rcParamsDefault
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import ArrayLike, NDArray

from lightning_sv.atomic import atomic_path
from lightning_sv.runs.events import Curve

#: name -> colour, in the order in which lines take them
PALETTE = {
    "blue": "#0072B2",
    "vermillion": "#D55E00",
    "green": "#009E73",
    "orange": "#E69F00",
    "purple": "#CC79A7",
    "sky": "#56B4E9",
    "grey": "#555555",
}
BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, GREY = PALETTE.values()

# four line styles and five free colours, so that combinations repeat late
LINES = ("-", "--", "-.", ":")

_DEFAULTS: dict[Any, Any] = dict(rcParamsDefault.items())
del _DEFAULTS["backend"]
#: decorator of functions that draw: matplotlib's defaults instead of the settings of a matplotlibrc
#: or the caller; `$` in a text is a dollar sign
plain_style = rc_context({**_DEFAULTS, "text.parse_math": False})
#: the same, except that `$` begins a formula
formula_style = rc_context(_DEFAULTS)

#: sign of a number in a text
_MINUS = re.compile(r"(?<!\S)-(?=\d)")
# a panel of 5 by 4 inches holds this many letters of a bold title, and of the label of its y axis
_PANEL = TextWrapper(42, break_on_hyphens=False)


class Look(NamedTuple):
    """Colour and line style of an arm."""

    colour: str
    line: str


class _TokenFormatter(EngFormatter):
    """Counts of tokens or parameters: 500k, 1.5M, 20B."""

    def __init__(self) -> None:
        super().__init__(sep="", usetex=False, useMathText=False)
        self.ENG_PREFIXES = {0: "", 3: "k", 6: "M", 9: "B", 12: "T"}


def human_tokens(tokens: float) -> str:
    """Format a token count with two significant digits: 1536000 -> 1.5M.

    Counts below 995 keep all digits.
    """
    rounded = float(f"{tokens:.2g}")
    if rounded < 1000:
        return f"{tokens:.0f}"
    return _TokenFormatter().format_data(rounded)


def set_limits(
    axes: Axes, curves: Sequence[Curve], from_share: float, include: Sequence[float] = ()
) -> None:
    """Set limits from the values after `from_share` of training; the first drop would dominate.

    `include` has further values that must be visible.
    """
    end = max(float(curve.tokens[-1]) for curve in curves)
    axes.set_xlim(0, end * 1.02 or 1)
    late = [curve.values[curve.tokens >= from_share * end] for curve in curves]
    values = np.concatenate([*late, include])
    values = values[np.isfinite(values)]
    if not values.size:
        return
    pad = 0.08 * float(np.ptp(values)) or 0.05
    axes.set_ylim(float(values.min()) - pad, float(values.max()) + pad)


def new_figure(panels: int, rows: int = 1) -> Figure:
    """Create a figure of `rows` with `panels` each, 5 by 4 inches."""
    # its own canvas instead of pyplot: no global state, no display
    figure = Figure(figsize=(5 * panels, 4 * rows), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def new_axes() -> Axes:
    """Create a figure of one panel, and return its axes."""
    return new_figure(panels=1).subplots()


def legend_below(figure: Figure, title: str) -> None:
    """Add one legend of all lines below the axes; the figure becomes higher by its rows."""
    lines: dict[str, Any] = {}
    for axes in figure.axes:
        for line, name in zip(*axes.get_legend_handles_labels(), strict=True):
            lines.setdefault(name, line)
    width = figure.get_figwidth()
    columns = 1
    if max(map(len, lines)) <= 4.5 * width:
        columns = 2
    # a name that is longer than the width would be cut off, with the number at its end
    fitting = TextWrapper(round(10 * width), break_on_hyphens=False)
    names = [_MINUS.sub("−", fitting.fill(name)) for name in lines]
    rows_of_names = sum(name.count("\n") + 1 for name in names)
    rows = len(title.splitlines()) + math.ceil(rows_of_names / columns)
    figure.set_figheight(figure.get_figheight() + 0.25 * rows)  # inches per row
    where: dict[str, Any] = {"loc": "outside lower left", "ncols": columns, "alignment": "left"}
    figure.legend(lines.values(), names, frameon=False, title=title, handlelength=3, **where)


def set_style(axes: Axes) -> None:
    """Style axes: a faint grid, the title at the left, texts in lines that fit the panel."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_title(_in_lines(axes.get_title()), loc="left", fontsize=11, fontweight="bold")
    axes.set_title("")
    axes.set_ylabel(_in_lines(axes.get_ylabel()))


def _in_lines(text: str) -> str:
    """Break each line of a text that is too long for a panel, because the layout cuts it."""
    return "\n".join(map(_PANEL.fill, text.split("\n")))


def draw_seeds(
    axes: Axes,
    tokens: ArrayLike,
    values: NDArray[np.float64],
    mean: ArrayLike,
    look: Look,
    **line: Any,
) -> None:
    """Draw an arm: a thick line for the mean (N,), a thin one per seed of values (seeds, N)."""
    if len(values) > 1:
        for seed in values:
            axes.plot(tokens, seed, color=look.colour, linewidth=0.7, alpha=0.45)
    axes.plot(tokens, mean, linestyle=look.line, color=look.colour, linewidth=2, **line)


def set_log_axis(axes: Axes, which: Literal["x", "y"], words: Callable[[float], str]) -> None:
    """Make an axis logarithmic, with labels at 1, 2 and 5 of each decade."""
    axes.set(**{f"{which}scale": "log"})  # it replaces the locator
    axis = {"x": axes.xaxis, "y": axes.yaxis}[which]
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda x, _: words(x)))
    axis.set_minor_formatter(NullFormatter())


def set_token_axis(axes: Axes) -> None:
    """Label the x axis with training tokens."""
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(_TokenFormatter())
    axes.set_xlabel("training tokens")


def write_picture(figure: Figure, path: str | Path) -> None:
    """Write a PNG atomically, and its directory."""
    with atomic_path(Path(path)) as partial:
        figure.savefig(partial, format="png")
