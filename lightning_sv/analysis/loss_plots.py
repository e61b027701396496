"""A figure from event files alone: the arms of a comparison, and their differences to the first."""

from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike, NDArray

from lightning_sv.analysis.paired import PairedCurve, on_one_grid, paired_curve
from lightning_sv.analysis.style import GREY, LINES, colours, legend_below, new_figure, plain_style, save, set_limits
from lightning_sv.errors import NotTestableError
from lightning_sv.runs.events import VAL_LOSS, Curve, Run

_LONG = 14


@plain_style
def draw_comparison(arms: Sequence[Sequence[Run]], path: str | Path, *, labels: Sequence[str] | None = None) -> None:
    """Validation loss of every arm, and its difference to the first with its 95% interval, against training tokens.

    Args:
        arms: the baseline's runs, one per seed, then those of each other arm, the same seeds in the same order
        path: the PNG to write
        labels: names of the arms; the runs' own labels when None

    Raises:
        NotTestableError: the arms have different numbers of runs, or a pair shares no stretch of training
    """
    counts = [len(runs) for runs in arms]
    if len(counts) < 2 or len(set(counts)) > 1 or not counts[0]:
        raise NotTestableError(
            f"A comparison pairs runs of several arms by seed, got {counts} runs; give one run per seed and arm."
        )
    names = list(labels or (runs[0].label for runs in arms))
    curves = [[run.curve(VAL_LOSS) for run in runs] for runs in arms]
    # long labels stay in a legend below the panels, where there is room: elsewhere the arms are A, B, ...
    long = max(map(len, names)) > _LONG
    short = list(ascii_uppercase[: len(names)]) if long else names
    legend = [f"{letter}: {name}" for letter, name in zip(short, names, strict=True)] if long else names
    looks = list(zip(colours(names), islice(cycle(LINES), len(names)), strict=True))

    figure = new_figure()
    left, right = figure.subplots(1, 2)
    draw_losses(left, curves, legend, looks)
    left.set_title("Which ends lower?" if len(arms) == 2 else "Which ends lowest?")
    seeds = f"mean of {counts[0]} seeds" if counts[0] > 1 else "one seed"
    if long:
        legend_below(figure, left, seeds)
    else:
        left.legend(frameon=False, loc="upper right", title=seeds, alignment="left")

    pairs = [paired_curve(curves[0], arm) for arm in curves[1:]]
    _legend_above(right, draw_differences(right, pairs, short, looks[1:]))
    save(figure, path)


def draw_seeds(
    axes: Axes, tokens: ArrayLike, values: NDArray[np.float64], mean: ArrayLike, look: tuple[str, str], **line: Any
) -> Line2D:
    """Draw an arm: a thick line for the mean, and a thin one per seed where there are several.

    Args:
        axes: where to draw
        tokens: (N,) training tokens
        values: (seeds, N) what was logged
        mean: (N,) what stands for all seeds
        look: colour and line style
        **line: further properties of the thick line

    Returns:
        The thick line.
    """
    colour, style = look
    for seed in values if len(values) > 1 else []:
        axes.plot(tokens, seed, color=colour, linewidth=0.7, alpha=0.45)
    (thick,) = axes.plot(tokens, mean, linestyle=style, color=colour, linewidth=2, **line)
    return thick


def draw_losses(
    axes: Axes,
    arms: Sequence[Sequence[Curve]],
    names: Sequence[str],
    looks: Sequence[tuple[str, str]],
    from_share: float = 0.2,
) -> None:
    """Validation loss of every arm: the mean over its seeds, and a thin line a seed.

    Args:
        axes: where to draw
        arms: validation curves of each arm, one per seed
        names: what the legend calls the arms
        looks: colour and line style of each arm
        from_share: the part of training from which the limits of the loss are taken
    """
    for name, look, arm in zip(names, looks, arms, strict=True):
        tokens, values = on_one_grid(arm)
        mark = {"marker": "o"} if len(tokens) == 1 else {}  # a recording may hold the last loss alone
        draw_seeds(axes, tokens, values, values.mean(axis=0), look, label=name, **mark)
    set_limits(axes, [curve for arm in arms for curve in arm], from_share)
    axes.set_ylabel("validation loss, nats per token")


def draw_differences(
    axes: Axes, pairs: Sequence[PairedCurve], names: Sequence[str], looks: Sequence[tuple[str, str]]
) -> str:
    """Difference of every arm to the first, with its band; the legend's title is returned.

    Args:
        axes: where to draw
        pairs: differences of the other arms to the first
        names: of all arms, the first one's first
        looks: colour and line style of each other arm
    """
    axes.axhline(0, color=GREY, linewidth=1)
    a, *others = names
    alike = len({pair.n for pair in pairs}) == 1
    for at, (pair, b, (colour, style)) in enumerate(zip(pairs, others, looks, strict=True)):
        label = f"{b}  {pair.mean[-1]:+.4f}"
        label += "" if alike else ", one pair" if pair.n == 1 else f", {pair.n} pairs"
        label += "" if pair.n == 1 or _resolved(pair) else ", not resolved"
        _draw_band(axes, pair, colour, style, label, aside=at)
    axes.set_title(f"How far from {a}? {_answer(pairs, others)}")
    axes.set_ylabel(f"difference to {a}, nats per token")
    set_limits(axes, [line for pair in pairs for line in _lines_of(pair)], from_share=0.2, include=0.0)
    return f"at the end; {_band_words(pairs)}"


def _draw_band(
    axes: Axes, pair: PairedCurve, colour: str, style: str = "-", label: str | None = None, aside: int = 0
) -> None:
    """Mean and interval against tokens; of a single point a bar, the next pair's beside it."""
    if len(pair.tokens) == 1:
        bars = np.stack([pair.mean - pair.low, pair.high - pair.mean]) if pair.n > 1 else None
        axes.errorbar(pair.tokens * (1 - 0.04 * aside), pair.mean, bars, fmt="o", color=colour, capsize=4, label=label)
        return
    if pair.n > 1:
        axes.fill_between(pair.tokens, pair.low, pair.high, color=colour, alpha=0.15, linewidth=0)
    axes.plot(pair.tokens, pair.mean, linestyle=style, color=colour, linewidth=2, label=label)


def _legend_above(axes: Axes, title: str) -> None:
    """A legend inside, with room above the lines wherever they end; its rows are some 6.5% of the panel."""
    below, above = axes.get_ylim()
    rows = 1 + len(axes.get_legend_handles_labels()[1])
    share = min(0.5, 0.02 + 0.065 * rows)
    axes.set_ylim(below, below + (above - below) / (1 - share))
    axes.legend(edgecolor="none", framealpha=0.9, loc="upper right", title=title, alignment="left")


def _answer(pairs: Sequence[PairedCurve], names: Sequence[str]) -> str:
    """Which arms end lower and which higher; how many, where their names would not fit."""
    if all(pair.n == 1 for pair in pairs):
        return "One pair, no verdict"
    resolved = [(name, pair.mean[-1]) for name, pair in zip(names, pairs, strict=True) if _resolved(pair)]
    sides = {side: [name for name, end in resolved if (end < 0) == (side == "lower")] for side in ("lower", "higher")}
    if not resolved:
        return "Not resolved"
    listed = ", ".join(f"{' and '.join(found)} {side}" for side, found in sides.items() if found)
    counted = ", ".join(f"{len(found)} {side}" for side, found in sides.items() if found)
    return listed if len(listed) <= 30 else counted


def _resolved(pair: PairedCurve) -> bool:
    """Whether the interval at the end excludes zero."""
    return bool(pair.low[-1] * pair.high[-1] > 0)


def _band_words(pairs: Sequence[PairedCurve]) -> str:
    counts = sorted({pair.n for pair in pairs})
    if counts == [1]:
        return "one pair: no interval, no verdict"
    some = f"{counts[0]} to " if len(counts) > 1 else ""
    return f"band: 95% interval of {some}{counts[-1]} pairs"


def _lines_of(pair: PairedCurve) -> list[Curve]:
    return [Curve(pair.tokens, values) for values in (pair.mean, pair.low, pair.high)]
