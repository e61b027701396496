"""Plots of final losses against the settings of a grid."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from lightning_sv.experiments.arms import Series
from lightning_sv.experiments.claims.claim_types import optimum_words
from lightning_sv.experiments.kinds.base import Drawing, LoadedPanel
from lightning_sv.experiments.report.plot import FINAL_LOSS, Plot, draw_losses, finished, with_looks
from lightning_sv.plots import style
from lightning_sv.statistics.optimum import Optimum

#: last part of a key -> label of its axis
_WORDS = {"lr": "peak learning rate", "init_std": "standard deviation at initialization"}


def grid_plots(panel: LoadedPanel) -> Drawing:
    """Plot the final loss of each arm against each setting, with its optimum."""
    axes = panel.spec.axes
    optima = {series.name: series.optimum for series in panel.series}
    is_swept = np.ptp([arm.point for arm in panel.arms], axis=0) > 0
    plots = []
    for axis, key in enumerate(axes):
        if is_swept[axis]:
            plots.append(_profile_plot(panel, axis, key, optima))
    notes = [f"{optimum_words(name, optimum, axes)}." for name, optimum in optima.items()]
    return Drawing(plots, notes)


def _profile_plot(panel: LoadedPanel, axis: int, key: str, optima: Mapping[str, Optimum]) -> Plot:
    axes = style.new_axes()
    for series, look in with_looks(panel.series):
        optimum = optima[series.name]
        label = f"{series.name}: {optimum.loss:.4f} at {optimum.values[axis]:.3g}"
        losses = _lowest_losses(series, axis)
        draw_losses(axes, losses, look, label=label, linestyle=look.line, linewidth=2, markersize=4)
        if not optimum.why_not:
            _draw_optimum(axes, optimum, axis, look.colour)
    style.set_log_axis(axes, "x", "{:g}".format)
    name = key.rpartition(".")[2]
    setting = _WORDS.get(name, name)
    axes.set(xlabel=setting, ylabel=FINAL_LOSS, title="Where is the optimum of each arm?")
    legend = "mean of the seeds, other settings at their best;\n"
    legend += "ring: the fitted optimum, with its standard error"
    return finished(name, f"{panel.title}, {setting}", axes, legend)


def _lowest_losses(series: Series, axis: int) -> dict[float, NDArray[np.float64]]:
    """Return value of one axis -> losses (seeds,) at the best values of the others; sorted."""
    lowest: dict[float, NDArray[np.float64]] = {}
    for arm in series.arms:
        value = arm.point[axis]
        if value not in lowest or arm.losses.mean() < lowest[value].mean():
            lowest[value] = arm.losses
    return dict(sorted(lowest.items()))


def _draw_optimum(axes: Axes, optimum: Optimum, axis: int, colour: str) -> None:
    """Draw a ring at the optimum, and its standard error."""
    value = optimum.values[axis]
    error = optimum.errors[axis]
    ends = value * np.exp([-error, error])
    axes.plot(ends, [optimum.loss] * 2, "-", color=colour, linewidth=1.2)
    axes.plot(
        value, optimum.loss, "o", markersize=13, markerfacecolor="none", markeredgecolor=colour
    )
