"""Shared style of all figures: colours, limits, token counts as text, files.

Colours are those of Okabe and Ito, which colour-blind readers can distinguish; `llama` is always blue.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib import rc_context, rcParamsDefault
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
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

_DEFAULTS: dict[Any, Any] = {key: value for key, value in rcParamsDefault.items() if key != "backend"}
#: decorator of functions that draw: matplotlib's defaults instead of the settings of a matplotlibrc or the caller;
#: `$` in a text is a dollar sign
plain_style = rc_context({**_DEFAULTS, "text.parse_math": False})
#: the same, except that `$` begins a formula
formula_style = rc_context(_DEFAULTS)

_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def human_tokens(tokens: float) -> str:
    """Format a token count with two significant digits: 1536000 -> 1.5M."""
    for size, unit in _UNITS:
        # half a unit of the last digit lower, so that 999999 becomes 1M, not 1000k
        if abs(tokens) >= size * (1 - 0.005):
            return f"{float(f'{tokens / size:.2g}'):g}{unit}"
    return f"{tokens:.0f}"


def set_limits(axes: Axes, curves: Sequence[Curve], from_share: float, include: float | None = None) -> None:
    """Set limits from the part of training after `from_share`, because the first drop would dominate."""
    end = max(float(curve.tokens[-1]) for curve in curves)
    late = np.concatenate([c.values[c.tokens >= from_share * end] for c in curves])
    late = np.append(late, [] if include is None else [include])
    late = late[np.isfinite(late)]
    axes.set_xlim(0, end * 1.02 or 1)
    if late.size and math.isfinite(float(np.ptp(late))):
        pad = 0.08 * float(np.ptp(late)) or 0.05
        axes.set_ylim(float(late.min()) - pad, float(late.max()) + pad)


def new_figure(panels: int = 2, rows: int = 1) -> Figure:
    """Create a figure of `rows` with `panels` each, 5 by 4 inches."""
    # its own canvas instead of pyplot: no global state, no display
    figure = Figure(figsize=(5 * panels, 4 * rows), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def legend_below(figure: Figure, axes: Axes, title: str) -> None:
    """Add a legend below the axes; the figure becomes higher by its rows."""
    lines, names = axes.get_legend_handles_labels()
    columns = 2 if max(map(len, names)) <= 4.5 * figure.get_figwidth() else 1
    rows = title.count("\n") + 1 + math.ceil(len(names) / columns)
    figure.set_figheight(figure.get_figheight() + 0.25 * rows)
    where: dict[str, Any] = {"loc": "outside lower left", "ncols": columns, "alignment": "left"}
    figure.legend(lines, names, frameon=False, title=title, handlelength=3, **where)


def set_style(axes: Axes) -> None:
    """Style axes: a faint grid, the title at the left, title and label broken into lines that fit the panel."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    title = axes.set_title(axes.get_title(), loc="left", fontsize=11, fontweight="bold")
    axes.set_title("")
    figure, spec = axes.get_figure(root=True), axes.get_subplotspec()
    assert figure is not None
    rows, columns = spec.get_gridspec().get_geometry() if spec else (1, 1)
    _fit(title, 0.8 * figure.bbox.width / columns)
    _fit(axes.yaxis.label, 0.8 * figure.bbox.height / rows)


def _fit(text: Text, room: float) -> None:
    """Break a text into lines of at most `room` pixels, because the layout cuts longer ones."""
    lines: list[str] = []
    for words in (line.split(" ") for line in text.get_text().split("\n")):
        lines.append("")
        for word in words:
            text.set_text(f"{lines[-1]} {word}".strip())
            if lines[-1] and max(text.get_window_extent().size) > room:
                lines.append(word)
            else:
                lines[-1] = text.get_text()
    text.set_text("\n".join(lines))


def draw_seeds(
    axes: Axes, tokens: ArrayLike, values: NDArray[np.float64], mean: ArrayLike, look: tuple[str, str], **line: Any
) -> None:
    """Draw an arm: a thick line for the mean (N,), and a thin one per seed of values (seeds, N), if several."""
    colour, style = look
    for seed in values if len(values) > 1 else []:
        axes.plot(tokens, seed, color=colour, linewidth=0.7, alpha=0.45)
    axes.plot(tokens, mean, linestyle=style, color=colour, linewidth=2, **line)


def set_log_axis(axes: Axes, which: Literal["x", "y"], words: Callable[[float], str]) -> None:
    """Make an axis logarithmic, with labels at 1, 2 and 5 of each decade."""
    set_scale, axis = (axes.set_xscale, axes.xaxis) if which == "x" else (axes.set_yscale, axes.yaxis)
    set_scale("log")  # it replaces the locator
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda x, _: words(x)))
    axis.set_minor_formatter(NullFormatter())


def set_token_axis(axes: Axes) -> None:
    """Label the x axis with training tokens."""
    # all ticks have one unit: 0.5M, 1M, 1.5M instead of 500k, 1M, 1.5M
    size, unit = next(((x, name) for x, name in _UNITS if axes.get_xlim()[1] >= x), (1.0, ""))
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / size:g}{unit}" if x else "0"))
    axes.set_xlabel("training tokens")


def write_picture(figure: Figure, path: str | Path) -> None:
    """Write a PNG atomically, and its directory."""
    with atomic_path(Path(path)) as partial:
        figure.savefig(partial, format="png")
