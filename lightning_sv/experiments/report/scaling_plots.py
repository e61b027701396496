"""Plots of losses and differences against the size of the model or the length of training."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from lightning_sv.errors import NotTestableError
from lightning_sv.experiments.claims.pooling import TWO_SIDED
from lightning_sv.experiments.kinds.base import Drawing, LoadedPanel
from lightning_sv.experiments.report.curve_plots import curve_plots, interval_legend
from lightning_sv.experiments.report.plot import FINAL_LOSS, Plot, draw_losses, finished, with_looks
from lightning_sv.plots import style
from lightning_sv.statistics.paired import PairedDifference


def scaling_plots(panel: LoadedPanel) -> Drawing:
    """Plot losses and differences against size, and the curves of each size."""
    plots = [_loss_plot(panel)]
    if panel.baseline is not None and len(panel.sizes) > 1:
        plots.append(gap_plot(panel))
    notes: list[str] = []
    for size in panel.sizes:
        # its arms, named by their series, as a panel of curves
        arms = tuple(replace(arm, label=arm.series) for arm in panel.arms if arm.size == size)
        spec = replace(panel.spec, title=f"{panel.title}, {size}", kind="curves")
        drawn, lacking = curve_plots(LoadedPanel(spec, arms, arms, panel.pool))
        plots += [plot._replace(name=f"{plot.name}-{size}") for plot in drawn]
        notes += lacking
    return Drawing(plots, notes)


def _loss_plot(panel: LoadedPanel) -> Plot:
    axes = style.new_axes()
    for series, look in with_looks(panel.series):
        losses = {arm.point[0]: arm.losses for arm in series.arms}
        draw_losses(axes, losses, look, label=series.name, linestyle=look.line, markersize=6)
    axes.set(title="How does the loss fall with size?", ylabel=FINAL_LOSS)
    style.set_log_axis(axes, "x", style.human_tokens)
    axes.set_xlabel("parameters")
    return finished("sizes", panel.title, axes, "means of the seeds")


def gap_plot(
    panel: LoadedPanel, name: str = "gap", by: str = "size", points: str = "parameters"
) -> Plot:
    """Plot the difference to the baseline at each point.

    Args:
        panel: panel of series
        name: name of the file
        by: what the points are, in the title
        points: label of the x axis

    Raises:
        NotTestableError: the baseline lacks runs, or each other arm does
    """
    if panel.baseline is None or len(panel.series) == 1:
        raise NotTestableError("the baseline, or each other arm, lacks runs.")
    (baseline, _), *others = with_looks(panel.series)
    axes = style.new_axes()
    axes.axhline(0, color=style.GREY, linewidth=1, zorder=1)  # behind the curves
    counts = []
    for place, (series, look) in enumerate(others):
        # side by side, so that intervals do not overlap
        places = np.array(baseline.values) * 1.03**place
        differences = [
            panel.difference(arm, base, confidence=TWO_SIDED)
            for arm, base in zip(series.arms, baseline.arms, strict=True)
        ]
        counts += [difference.n for difference in differences]
        end = style.human_tokens(baseline.values[-1])
        label = f"{series.name}  {differences[-1].mean:+.3f} at {end}"
        _draw_gaps(axes, places, differences, look, label)

    style.set_log_axis(axes, "x", style.human_tokens)
    axes.set_title(f"The difference by {by}\n{panel.title}")
    axes.set(xlabel=points, ylabel=f"difference to {baseline.label}, nats per token")
    alt = f"{panel.title}, difference to {baseline.label}"
    return finished(name, alt, axes, interval_legend(counts))


def _draw_gaps(
    axes: Axes,
    places: NDArray[np.float64],
    differences: Sequence[PairedDifference],
    look: style.Look,
    label: str,
) -> None:
    """Draw the difference at each place with its interval."""
    means = [difference.mean for difference in differences]
    half = np.nan_to_num([difference.smallest_resolvable for difference in differences])
    marks: dict[str, Any] = {"marker": "o", "color": look.colour, "linestyle": look.line}
    axes.errorbar(places, means, half, capsize=3, label=label, **marks)
