"""Plots of losses and differences against the size of the model or the length of training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from lightning_sv.errors import NotTestableError
from lightning_sv.experiments.arms import Series
from lightning_sv.experiments.claims.pooling import TWO_SIDED
from lightning_sv.experiments.kinds.base import Drawing, LoadedPanel
from lightning_sv.experiments.laws import fit_laws
from lightning_sv.experiments.report.curve_plots import curve_plots
from lightning_sv.experiments.report.plot import FINAL_LOSS, Plot, draw_losses, finished, with_looks
from lightning_sv.plots import style
from lightning_sv.statistics.scaling import ScalingFit

_DOTS = (0, (1, 3))
_LAW_WIDTHS = {"power": 2.0, "log-linear": 1.2}


def scaling_plots(panel: LoadedPanel) -> Drawing:
    """Plot loss against size with both laws, the differences by size, and the curves of each size.

    Each fit is of two arms; the curve of the baseline is that of the first fit.
    """
    fits, notes = fit_laws(panel.series)
    plots = [_fit_plot(panel, fits)]
    if fits:
        plots.append(gap_plot(panel, fits))
    for size in panel.sizes:
        drawn, lacking = curve_plots(_panel_of_size(panel, size))
        plots += [plot._replace(name=f"{plot.name}-{size}") for plot in drawn]
        notes += lacking
    return Drawing(plots, notes)


def _panel_of_size(panel: LoadedPanel, size: str) -> LoadedPanel:
    """Return the arms of one size, named by their series, as a panel of curves."""
    arms = tuple(replace(arm, label=arm.series) for arm in panel.arms if arm.size == size)
    spec = replace(panel.spec, title=f"{panel.title}, {size}", kind="curves")
    return LoadedPanel(spec, arms, arms, panel.pool)


def _fit_plot(panel: LoadedPanel, fits: Mapping[str, list[ScalingFit]]) -> Plot:
    axes = style.new_axes()
    first_fits = next(iter(fits.values()), [])
    for series, look in with_looks(panel.series):
        losses = dict(zip(series.values, series.losses, strict=True))
        draw_losses(axes, losses, look, label=series.name, linestyle="", markersize=6)
        own_fits = first_fits if series.baseline else fits.get(series.label, [])
        _draw_laws(axes, series, own_fits, look)
    axes.plot([], [], linestyle=_DOTS, color=style.GREY, linewidth=1.2, label="linear in ln N")
    axes.set(title="How does the loss fall with size?", ylabel=FINAL_LOSS)
    style.set_log_axis(axes, "x", style.human_tokens)
    axes.set_xlabel("parameters")
    return finished(
        "fit", panel.title, axes, "N: the size; means of the seeds, fits of least squares"
    )


def _draw_laws(axes: Axes, series: Series, fits: Sequence[ScalingFit], look: style.Look) -> None:
    """Draw the power law as a line, and the log-linear law with dots."""
    sizes = _around(series.values)
    for place, fit in enumerate(fits):
        law = fit.a if series.baseline else fit.b
        (line,) = axes.plot(sizes, law(sizes), color=look.colour, linestyle=_law_line(fit, look))
        line.set_linewidth(_LAW_WIDTHS[fit.form])
        if place == 0:
            line.set_label(law.formula())


def _law_line(fit: ScalingFit, look: style.Look) -> Any:
    return look.line if fit.form == "power" else _DOTS


@dataclass(frozen=True)
class PointWords:
    """Words of a plot of differences against the points of series.

    Attributes:
        name: name of its file
        by: what the points are
        axis: label of the x axis
        ticks: if True, the axis has a tick at each point
    """

    name: str
    by: str
    axis: str
    ticks: bool = False


SIZES = PointWords("gap", "size", "parameters")
LENGTHS = PointWords("lengths", "length of training", "training tokens per parameter", ticks=True)


def gap_plot(
    panel: LoadedPanel, fits: Mapping[str, list[ScalingFit]], words: PointWords = SIZES
) -> Plot:
    """Plot the difference to the baseline at each point, with that of the laws if there are fits.

    Raises:
        NotTestableError: the baseline lacks runs
    """
    if panel.baseline is None:
        raise NotTestableError("the baseline lacks runs.")
    (baseline, _), *others = with_looks(panel.series)
    axes = style.new_axes()
    axes.axhline(0, color=style.GREY, linewidth=1, zorder=1)  # behind the curves
    for place, (series, look) in enumerate(others):
        if fits and series.label not in fits:
            continue
        # side by side, so that intervals do not overlap
        points = np.array(baseline.values) * 1.03**place
        line = "" if fits else look.line
        _draw_gaps(axes, panel, baseline, series, points, look._replace(line=line))
        _draw_gaps_of_laws(axes, points, fits.get(series.label, []), look)

    style.set_log_axis(axes, "x", style.human_tokens)
    if words.ticks:
        axes.set_xticks(baseline.values, map(style.human_tokens, baseline.values))
    axes.set_title(f"The difference by {words.by}\n{panel.title}")
    axes.set(xlabel=words.axis, ylabel=f"difference to {baseline.label}, nats per token")
    legend = _gap_legend(len(baseline.arms[0].runs), has_fits=bool(fits))
    return finished(words.name, f"{panel.title}, difference to {baseline.label}", axes, legend)


def _draw_gaps(
    axes: Axes,
    panel: LoadedPanel,
    baseline: Series,
    series: Series,
    points: NDArray[np.float64],
    look: style.Look,
) -> None:
    """Draw the difference at each point with its interval."""
    pairs = zip(series.arms, baseline.arms, strict=True)
    differences = [panel.difference(arm, base, confidence=TWO_SIDED) for arm, base in pairs]
    means = [difference.mean for difference in differences]
    half = np.nan_to_num([difference.smallest_resolvable for difference in differences])
    label = f"{series.name}  {means[-1]:+.3f} at {style.human_tokens(baseline.values[-1])}"
    marks: dict[str, Any] = {"marker": "o", "color": look.colour, "linestyle": look.line}
    axes.errorbar(points, means, half, capsize=3, label=label, **marks)


def _draw_gaps_of_laws(
    axes: Axes, points: NDArray[np.float64], fits: Sequence[ScalingFit], look: style.Look
) -> None:
    """Draw the difference of the laws of both arms."""
    sizes = _around(points)
    for fit in fits:
        (line,) = axes.plot(sizes, fit.b(sizes) - fit.a(sizes), color=look.colour, linewidth=1.5)
        line.set_linestyle(_law_line(fit, look))


def _gap_legend(count: int, *, has_fits: bool) -> str:
    if count == 1:
        return "one pair: no interval"
    interval = f"95% interval of {count} pairs"
    return f"{interval}; lines: fits" if has_fits else interval


def _around(sizes: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 100 sizes, from 10% below to 10% above those of a series."""
    return np.geomspace(min(sizes) / 1.1, max(sizes) * 1.1, 100)
