"""Pictures of final losses: against size with the fitted laws, and against a setting with its optimum."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter
from numpy.typing import NDArray

from lightning_sv.analysis.optimum import Optimum
from lightning_sv.analysis.scaling import Scaling
from lightning_sv.analysis.style import GREY, human_tokens, new_figure
from lightning_sv.experiments.claims.pooling import TWO_SIDED
from lightning_sv.experiments.report.plots import Plot, axis_words, baseline_first, curve_plots, finished, looks_of
from lightning_sv.experiments.results import Panel, Series

_DOTS = (0, (1, 3))
_LOSS = "final validation loss, nats per token"


def scaling_plots(panel: Panel) -> tuple[list[Plot], list[str]]:
    """Loss against size with both laws, the difference to the baseline at every size, and the training of every size.

    The baseline's own curve is that of its fit with the first other series: each fit is of two arms.
    """
    fits, notes = {}, []
    for series, scaling in panel.fits:
        if isinstance(scaling, str):
            notes.append(f"{series.name} has no scaling fit: {scaling}")
        else:
            fits[series.label] = scaling
            notes += [f"{series.name}: {warning}" for warning in scaling.warnings]
    plots = [_fit_plot(panel, fits)]
    if fits:
        plots.append(_gap_plot(panel, fits))
    for i, size in enumerate(panel.sizes):
        arms = tuple(replace(panel.arm(series.arms[i]), label=series.label) for series in panel.series)
        spec = replace(panel.spec, title=f"{panel.title}, {size}", kind="curves")
        drawn, lacking = curve_plots(Panel(spec, arms))
        plots += [plot._replace(name=f"{plot.name}-{size}") for plot in drawn if plot.name != "end"]
        notes += lacking
    return plots, notes


def _fit_plot(panel: Panel, fits: dict[str, Scaling]) -> Plot:
    all_series = baseline_first(panel.series)
    axes = new_figure(panels=1).subplots()
    for series, (colour, style) in zip(all_series, looks_of(all_series), strict=True):
        sizes, losses = np.array(series.values, float), panel.losses(series)
        for size, values in zip(sizes, losses, strict=True):
            axes.plot(np.full(len(values), size), values, ".", color=colour, alpha=0.45, markersize=5)
        means = [values.mean() for values in losses]
        axes.plot(sizes, means, "o", color=colour, markersize=6, label=series.name)
        fit = next(iter(fits.values()), None) if series.baseline else fits.get(series.label)
        grid = _around(sizes)
        for form in fit.fits if fit else ():
            law = form.a if series.baseline else form.b
            if form.form == "power":
                axes.plot(grid, law(grid), linestyle=style, color=colour, linewidth=2, label=law.formula())
            else:
                label = law.formula() if fit and fit.power is None else None
                axes.plot(grid, law(grid), linestyle=_DOTS, color=colour, linewidth=1.2, label=label)
    axes.plot([], [], linestyle=_DOTS, color=GREY, linewidth=1.2, label="linear in ln N")
    axes.set(title="How does the loss fall with size?", ylabel=_LOSS)
    _set_size_axis(axes, panel.series[0])
    return finished("fit", panel.title, axes, "N: the size; means of the seeds, fits of least squares")


def _gap_plot(panel: Panel, fits: dict[str, Scaling]) -> Plot:
    base, *others = all_series = baseline_first(panel.series)
    axes = new_figure(panels=1).subplots()
    for i, (series, (colour, style)) in enumerate(zip(others, looks_of(all_series)[1:], strict=True)):
        if series.label not in fits:
            continue
        sizes = np.array(series.values) * 1.03**i  # side by side, where intervals would overlap
        means, half = _gaps(panel, series, base)
        axes.errorbar(sizes, means, yerr=half, fmt="o", color=colour, capsize=3, label=series.name)
        grid = _around(sizes)
        for form in fits[series.label].fits:
            line = style if form.form == "power" else _DOTS
            axes.plot(grid, form.b(grid) - form.a(grid), linestyle=line, color=colour, linewidth=1.5)
    axes.set_title("Does the difference grow with size?")
    _set_size_axis(axes, panel.series[0])
    return _gap_picture("gap", panel, base, axes, "; lines: fits")


def length_plots(panel: Panel) -> tuple[list[Plot], list[str]]:
    """Difference to the baseline against tokens a parameter, each point a training of its own."""
    base, *others = all_series = baseline_first(panel.series)
    axes = new_figure(panels=1).subplots()
    for i, (series, (colour, style)) in enumerate(zip(others, looks_of(all_series)[1:], strict=True)):
        means, half = _gaps(panel, series, base)
        along = np.array(base.values) * 1.04**i  # side by side, where intervals would overlap
        label = f"{series.name}  {means[-1]:+.3f} at {base.values[-1]:.0f}"
        axes.errorbar(along, means, yerr=half, fmt="o", linestyle=style, color=colour, capsize=3, label=label)
    _set_log_axis(axes, base.values, lambda x: f"{x:.0f}")
    axes.set(xlabel="training tokens a parameter", title=f"The difference by length of training\n{panel.title}")
    return [_gap_picture("lengths", panel, base, axes)], []


def _gaps(panel: Panel, series: Series, base: Series) -> tuple[list[float], list[float]]:
    """Differences to the baseline at every point, and half of their intervals."""
    ends = ((panel.arm(x), panel.arm(y)) for x, y in zip(series.arms, base.arms, strict=True))
    pairs = [panel.difference(*of, confidence=TWO_SIDED) for of in ends]
    return [pair.mean for pair in pairs], [pair.smallest_resolvable or 0.0 for pair in pairs]


def _gap_picture(name: str, panel: Panel, base: Series, axes: Axes, more: str = "") -> Plot:
    axes.axhline(0, color=GREY, linewidth=1, zorder=1)  # behind what is drawn
    axes.set_ylabel(f"difference to {base.label}, nats per token")
    n = len(panel.losses(base)[0])
    legend = f"95% interval of {n} pairs{more}" if n > 1 else "one pair: no interval"
    return finished(name, f"{panel.title}, difference to {base.label}", axes, legend)


def _around(sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """(100,) sizes from a little below to a little above those of a series."""
    return np.geomspace(sizes.min() / 1.1, sizes.max() * 1.1, 100)


def _set_size_axis(axes: Axes, first: Series) -> None:
    # the first series' sizes alone: the others' differ by their scale vectors
    _set_log_axis(axes, first.values, human_tokens)
    axes.set_xlabel("parameters")


def _set_log_axis(axes: Axes, ticks: Sequence[float], words: Callable[[float], str]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(_apart(ticks, max(len(words(tick)) for tick in ticks)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: words(x)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _apart(ticks: Sequence[float], letters: int) -> list[float]:
    """Some of the ticks, from the lowest on, so that labels of so many letters lie side by side on a log axis."""
    room = (max(ticks) / min(ticks)) ** ((letters + 1) / 45) * (1 - 1e-9)  # some 45 letters fit between first and last
    kept = [min(ticks)]
    for tick in sorted(ticks):
        if tick >= kept[-1] * room and tick > kept[-1]:
            kept.append(tick)
    return kept


def grid_plots(panel: Panel) -> tuple[list[Plot], list[str]]:
    """Final loss of every arm against each setting, the others at their best; its optimum with its error."""
    notes, optima = [], {}
    for series in panel.series:
        optima[series.label] = found = panel.optimum(series)
        if found.why_not:
            at = ", ".join(f"{value:g}" for value in found.values)
            notes.append(f"{series.name} has no fitted optimum: {found.why_not} ({at}).")
    plots = []
    for k, key in enumerate(panel.spec.axes):
        ticks = sorted({point[k] for series in panel.series for point in series.points})
        if len(ticks) > 1:
            plots.append(_profile_plot(panel, k, key, ticks, optima))
    return plots, notes


def _profile_plot(panel: Panel, k: int, key: str, ticks: Sequence[float], optima: dict[str, Optimum]) -> Plot:
    all_series = baseline_first(panel.series)
    axes = new_figure(panels=1).subplots()
    for series, (colour, style) in zip(all_series, looks_of(all_series), strict=True):
        lowest: dict[float, NDArray[np.float64]] = {}
        for point, losses in zip(series.points, panel.losses(series), strict=True):
            if point[k] not in lowest or losses.mean() < lowest[point[k]].mean():
                lowest[point[k]] = losses
        values = sorted(lowest)
        for x in values:
            axes.plot(np.full(len(lowest[x]), x), lowest[x], ".", color=colour, alpha=0.45, markersize=5)
        best = optima[series.label]
        label = f"{series.name}: {best.loss:.4f} at {best.values[k]:.3g}"
        means = [lowest[x].mean() for x in values]
        axes.plot(values, means, "o", linestyle=style, color=colour, linewidth=2, markersize=4, label=label)
        if not best.why_not:
            off = best.values[k] * np.exp([-best.errors[k], best.errors[k]])
            axes.plot(off, [best.loss] * 2, "-", color=colour, linewidth=1.2)
            axes.plot(best.values[k], best.loss, "o", markersize=13, markerfacecolor="none", markeredgecolor=colour)
    _set_log_axis(axes, ticks, lambda x: f"{x:g}")
    axes.set(xlabel=axis_words(key), ylabel=_LOSS, title="Where is the optimum of each arm?")
    others = ", the other settings at their best" if len(panel.spec.axes) > 1 else ""
    legend = f"mean of the seeds{others};\nring: the fitted optimum, with its standard error"
    return finished(key.rpartition(".")[2], f"{panel.title}, {axis_words(key)}", axes, legend)
