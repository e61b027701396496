"""Figures from event files alone: two arms against each other, and one training run.

Colours are Okabe and Ito's, which stay apart for colour-blind readers; ``llama`` is always blue.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from lightning_sv.paper.events import TRAIN_LOSS, VAL_LOSS, Curve, Run
from lightning_sv.paper.stats import PairedCurve, on_common_tokens, paired_curve

BLUE, VERMILLION, GREEN = "#0072B2", "#D55E00", "#009E73"
ORANGE, PURPLE, SKY = "#E69F00", "#CC79A7", "#56B4E9"
GREY = "#555555"
# strategies that keep one colour in every figure; the others take what is free
_FIXED = {"llama": BLUE, "unified": VERMILLION, "nop": PURPLE}
_FREE = (VERMILLION, GREEN, ORANGE, PURPLE, SKY)
_PROJECTIONS = {
    "q_proj": ("Q", BLUE, "-"),
    "k_proj": ("K", ORANGE, "--"),
    "v_proj": ("V", GREEN, "-."),
}


_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def human_tokens(tokens: float, digits: int = 2) -> str:
    """1536000 -> 1.5M: a token count as a reader says it.

    Args:
        tokens: Number of tokens.
        digits: Significant figures.
    """
    for size, unit in _UNITS:
        # half a unit of the last figure below, so that 999999 reads 1M rather than 1000k
        if abs(tokens) >= size * (1 - 0.5 * 10.0**-digits):
            return f"{float(f'{tokens / size:.{digits}g}'):g}{unit}"
    return f"{tokens:.0f}"


def _tick_words(end: float) -> Callable[[float, int], str]:
    """All ticks of an axis in one unit: 0.5M, 1M, 1.5M rather than 500k, 1M, 1.5M."""
    size, unit = next(((x, name) for x, name in _UNITS if end >= x), (1.0, ""))
    return lambda tokens, _: f"{tokens / size:g}{unit}" if tokens else "0"


def colours(labels: Sequence[str]) -> list[str]:
    """One colour per label: fixed for the strategies named here, the next free one otherwise."""
    fixed = [_FIXED.get(label) for label in labels]
    free = iter(colour for colour in _FREE if colour not in fixed)
    return [next(free, GREY) if colour is None else colour for colour in fixed]


def draw_comparison(
    runs_a: Sequence[Run],
    runs_b: Sequence[Run],
    path: str | Path,
    *,
    labels: tuple[str, str] | None = None,
    confidence: float = 0.95,
) -> None:
    """Validation loss of both arms, and B - A with its interval, against training tokens.

    Args:
        runs_a: Runs of arm A, one per seed.
        runs_b: Runs of arm B, the same seeds in the same order.
        path: The PNG to write.
        labels: Names of the arms; the runs' own labels when None.
        confidence: Coverage of the band.

    Raises:
        ValueError: When the arms have different numbers of runs, or share no evaluation.
    """
    if len(runs_a) != len(runs_b) or not runs_a:
        raise ValueError(
            f"A comparison pairs runs by seed, got {len(runs_a)} and {len(runs_b)}; give one run per seed and arm."
        )
    a, b = labels or (runs_a[0].label, runs_b[0].label)
    curves = [[run.curve(VAL_LOSS) for run in runs] for runs in (runs_a, runs_b)]
    pair = paired_curve(curves[0], curves[1], confidence)

    # long labels stay in the legend, where there is room: elsewhere the arms are A and B
    short, prefix = (a, b), ("", "")
    if max(len(a), len(b)) > 14:
        short, prefix = ("A", "B"), ("A: ", "B: ")
    figure = _figure()
    left, right = figure.subplots(1, 2)
    shown = zip((prefix[0] + a, prefix[1] + b), colours((a, b)), ("-", "--"), curves, strict=True)
    for label, colour, style, arm in shown:
        for curve in arm if len(arm) > 1 else []:
            left.plot(*curve, color=colour, linewidth=0.7, alpha=0.45)
        tokens, values = on_common_tokens(arm)
        left.plot(tokens, values.mean(axis=0), style, color=colour, linewidth=2, label=label)
    _limits(left, [curve for arm in curves for curve in arm], from_share=0.2)
    left.set_ylabel("validation loss, nats per token")
    left.set_title("Which ends lower?")
    seeds = f"mean of {len(runs_a)} seeds" if len(runs_a) > 1 else "one seed"
    left.legend(frameon=False, loc="upper right", title=seeds, alignment="left")

    _draw_difference(right, pair, *short, len(runs_a), confidence)
    _save(figure, path)


def _draw_difference(axes: Axes, pair: PairedCurve, a: str, b: str, n: int, confidence: float) -> None:
    axes.axhline(0, color=GREY, linewidth=1)
    axes.plot(pair.tokens, pair.mean, color="black", linewidth=2)
    end, low, high = (float(values[-1]) for values in (pair.mean, pair.low, pair.high))
    curves = [Curve(pair.tokens, pair.mean)]
    if n > 1:
        axes.fill_between(pair.tokens, pair.low, pair.high, color="black", alpha=0.15, linewidth=0)
        curves += [Curve(pair.tokens, pair.low), Curve(pair.tokens, pair.high)]
        band = f"band: {confidence:.0%} interval of {n} pairs"
    else:
        band = "one pair: no interval, no verdict"
    if n > 1 and low * high <= 0:
        answer = "Not resolved"
        band += ", covers zero at the end"
    else:
        digits = 3 if abs(end) >= 5e-3 else 4
        answer = f"{b} ends {abs(end):.{digits}f} {'lower' if end < 0 else 'higher'}"
    axes.set_title(f"How far apart? {answer}")
    _limits(axes, curves, from_share=0.2, include=0.0)
    axes.set_ylabel(f"{b} - {a}, nats per token")
    # the note goes where the line does not end
    below, above = axes.get_ylim()
    place = (0.97, "top") if end < (below + above) / 2 else (0.03, "bottom")
    where: dict[str, Any] = {"transform": axes.transAxes, "ha": "right", "va": place[1]}
    axes.text(0.985, place[0], band, color=GREY, fontsize=9, **where)


def draw_run(run: Run, path: str | Path) -> None:
    """One run: its losses, and the growth of its Q, K and V branches, against training tokens.

    A branch's norm is that of its effective weight (scale vectors folded in), averaged over the
    layers, relative to its first logged value. Runs without branch norms get the losses alone.

    Args:
        run: A run, complete or not (``read_run(..., complete=False)``).
        path: The PNG to write.

    Raises:
        ValueError: When the run has logged neither a training nor a validation loss.
    """
    tags = {name: f"branch_norm/mean/{name}/effective" for name in _PROJECTIONS}
    branches = {name: run.curve(tag) for name, tag in tags.items() if tag in run.curves}
    losses = [tag for tag in (TRAIN_LOSS, VAL_LOSS) if tag in run.curves]
    if not losses:
        raise ValueError(f"{run.dir} has logged no loss yet; draw it once training has begun.")

    figure = _figure(panels=2 if branches else 1)
    panels = figure.subplots(1, 2 if branches else 1, squeeze=False)[0]
    _draw_losses(panels[0], run)
    if branches:
        _draw_branches(panels[1], branches)
    figure.suptitle(run.label, x=0.012, ha="left", fontsize=10, color=GREY)
    _save(figure, path)


def _draw_losses(axes: Axes, run: Run) -> None:
    shown: list[Curve] = []
    if TRAIN_LOSS in run.curves:
        train = run.curve(TRAIN_LOSS)
        smooth = _running_mean(train.values, max(1, len(train.values) // 50))
        axes.plot(*train, color=SKY, linewidth=0.6, alpha=0.5)
        axes.plot(train.tokens, smooth, color=SKY, linewidth=1.8, label="train, running mean")
        shown = [Curve(train.tokens, smooth)]
    title = "How low does the loss get?"
    if VAL_LOSS in run.curves:
        val = run.curve(VAL_LOSS)
        axes.plot(*val, "o-", color=VERMILLION, linewidth=1.8, markersize=3, label="validation")
        shown.append(val)
        title += f" {run.val_loss:.3f} at {human_tokens(run.tokens)} tokens"
    _limits(axes, shown, from_share=0.05)
    axes.set_ylabel("loss, nats per token")
    axes.set_title(title)
    axes.legend(frameon=False, loc="upper right")


def _draw_branches(axes: Axes, branches: dict[str, Curve]) -> None:
    shown = []
    for name, curve in branches.items():
        symbol, colour, style = _PROJECTIONS[name]
        growth = curve.values / curve.values[0]
        label = f"{symbol}, x {growth[-1]:.2f} at the end"
        axes.plot(curve.tokens, growth, style, color=colour, linewidth=2, label=label)
        shown.append(Curve(curve.tokens, growth))
    axes.axhline(1, color=GREY, linewidth=1)
    _limits(axes, shown, from_share=0.0, include=1.0)
    axes.set_ylabel("norm of the branch / its start")
    axes.set_title("Do Q, K and V grow together?")
    axes.legend(loc="best", edgecolor="none", framealpha=0.9)


def _running_mean(values: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """Mean over the ``width`` values around each that are finite, fewer at the ends."""
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    # centred: a trailing mean would lag behind the falling loss and look worse than it
    at = np.arange(len(values))
    start, stop = np.maximum(0, at - width // 2), np.minimum(len(values), at + (width + 1) // 2)
    number = counts[stop] - counts[start]
    mean: NDArray[np.float64] = np.where(number > 0, (sums[stop] - sums[start]) / np.maximum(number, 1), np.nan)
    return mean


def _limits(axes: Axes, curves: Sequence[Curve], from_share: float, include: float | None = None) -> None:
    """Limits from the part of training after ``from_share``: the first drop would hide the rest."""
    end = max(float(curve.tokens[-1]) for curve in curves)
    late = np.concatenate([c.values[c.tokens >= from_share * end] for c in curves])
    late = np.append(late, [] if include is None else [include])
    late = late[np.isfinite(late)]
    axes.set_xlim(0, end * 1.02 or 1)
    if late.size and math.isfinite(float(np.ptp(late))):
        pad = 0.08 * float(np.ptp(late)) or 0.05
        axes.set_ylim(float(late.min()) - pad, float(late.max()) + pad)


def _figure(panels: int = 2) -> Figure:
    # a Figure of its own canvas, not pyplot: no global state, no display
    figure = Figure(figsize=(5 * panels, 4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: str | Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(_tick_words(axes.get_xlim()[1])))
        axes.set_xlabel("training tokens")
        axes.set_title(axes.get_title(), loc="left", fontsize=11, fontweight="bold")
        axes.set_title("")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
