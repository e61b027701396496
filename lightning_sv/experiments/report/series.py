"""Pictures of final losses: against size with the fitted laws, and against a setting with its optimum."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from lightning_sv.analysis.paired import paired_difference
from lightning_sv.analysis.scaling import Scaling, fit_scaling
from lightning_sv.analysis.style import GREY, human_tokens, legend_below, new_figure, set_style
from lightning_sv.experiments.report.views import View, arm_name, axis_words, end_losses, looks_of
from lightning_sv.experiments.results import Panel, Series


def series_losses(panel: Panel, series: Series) -> list[Any]:
    """Final losses of a series: one (n,) array per point, NaN where a run diverged."""
    by_label = {arm.label: arm for arm in panel.arms}
    return [end_losses(by_label[label]) for label in series.arms]


def series_sizes(series: Series) -> list[float]:
    """What a scaling panel has along x, one per point of the series."""
    return [float(x) for x in series.values]


@lru_cache(maxsize=64)
def panel_fits(panel: Panel) -> tuple[tuple[tuple[str, bool, Scaling], ...], tuple[str, ...]]:
    """(label, ours, fit with the baseline) of every other series of a scaling panel, and what weakens them.

    Both arms are fitted at the baseline's sizes: what a strategy adds in scale vectors is part of it.
    """
    base = next((s for s in panel.series if s.baseline), None)
    found, notes = [], []
    for series in panel.series:
        if base is None or series is base:
            continue
        name = arm_name(series.label, series.ours)
        try:
            if series.sizes != base.sizes:
                raise ValueError(f"its sizes {series.sizes} are not the baseline's {base.sizes}.")
            losses = (np.stack(series_losses(panel, s)) for s in (base, series))
            fit = fit_scaling(series_sizes(base), *losses)
        except ValueError as error:
            notes.append(f"{name} has no scaling fit: {error}")
            continue
        found.append((series.label, series.ours, fit))
        notes += [f"{name}: {warning}" for warning in fit.warnings]
    return tuple(found), tuple(notes)


def scaling_views(panel: Panel) -> tuple[list[View], list[str]]:
    """Loss against size with both laws, and the difference to the baseline at every size.

    The baseline's own curve is that of its fit with the first other series: each fit is of two arms.

    Args:
        panel: Of the kind ``scaling``.
    """
    series = sorted(panel.series, key=lambda s: not s.baseline)
    looks = looks_of([(s.label, s.baseline) for s in series])
    fits, notes = panel_fits(panel)
    by_label = {label: fit for label, _, fit in fits}
    figure = new_figure(panels=1)
    axes = figure.subplots()
    for s, (colour, style) in zip(series, looks, strict=True):
        sizes, losses = np.array(series_sizes(s)), series_losses(panel, s)
        for size, values in zip(sizes, losses, strict=True):
            axes.plot(np.full(len(values), size), values, ".", color=colour, alpha=0.45, markersize=5)
        means = [float(np.mean(values)) for values in losses]
        axes.plot(sizes, means, "o", color=colour, markersize=6, label=arm_name(s.label, s.ours))
        fit = (fits[0][2] if fits else None) if s.baseline else by_label.get(s.label)
        grid = np.geomspace(sizes.min() / 1.1, sizes.max() * 1.1, 100)
        for form in fit.fits if fit else ():
            law = form.a if s.baseline else form.b
            power = form.form == "power"
            label = law.formula() if power or fit is None or fit.power is None else None
            axes.plot(
                grid,
                law(grid),
                linestyle=style if power else (0, (1, 3)),
                color=colour,
                linewidth=2 if power else 1.2,
                label=label,
            )
    axes.plot([], [], linestyle=(0, (1, 3)), color=GREY, linewidth=1.2, label="linear in ln N")
    axes.set_title("How does the loss fall with size?")
    axes.set_ylabel("final validation loss, nats per token")
    _size_axis(axes, panel)
    legend_below(figure, axes, "N: the size; means of the seeds, fits of least squares")
    views = [View("fit", f"{panel.title}: {'; '.join(axes.get_legend_handles_labels()[1])}", figure)]
    if fits:
        views.append(_gap_view(panel, series, looks))
    return views, list(notes)


def _gap_view(panel: Panel, series: Sequence[Series], looks: list[tuple[str, str]]) -> View:
    figure = new_figure(panels=1)
    axes = figure.subplots()
    axes.axhline(0, color=GREY, linewidth=1)
    by_label = {label: fit for label, _, fit in panel_fits(panel)[0]}
    base = series_losses(panel, series[0])
    for i, (s, (colour, style)) in enumerate(zip(series[1:], looks[1:], strict=True)):
        if s.label not in by_label:
            continue
        sizes = np.array(series_sizes(s)) * 1.03**i  # side by side, where intervals would overlap
        pairs = [paired_difference(a, b) for a, b in zip(base, series_losses(panel, s), strict=True)]
        half = [p.smallest_resolvable or 0.0 for p in pairs]
        look: dict[str, Any] = {"color": colour, "capsize": 3, "label": arm_name(s.label, s.ours)}
        axes.errorbar(sizes, [p.mean for p in pairs], yerr=half, fmt="o", **look)
        grid = np.geomspace(sizes.min() / 1.1, sizes.max() * 1.1, 100)
        for form in by_label[s.label].fits:
            line = style if form.form == "power" else (0, (1, 3))
            axes.plot(grid, form.b(grid) - form.a(grid), linestyle=line, color=colour, linewidth=1.5)
    axes.set_title("Does the difference grow with size?")
    axes.set_ylabel(f"difference to {series[0].label}, nats per token")
    _size_axis(axes, panel)
    n = len(base[0])
    legend_below(figure, axes, f"95% interval of {n} pairs; lines: fits" if n > 1 else "one pair: no interval")
    return View("gap", f"{panel.title}: difference to {series[0].label} at every size", figure)


def _size_axis(axes: Axes, panel: Panel) -> None:
    # the first series' alone: the others' differ by their scale vectors
    _log_axis(axes, series_sizes(panel.series[0]), human_tokens)
    axes.set_xlabel("parameters")
    set_style(axes)


def _log_axis(axes: Axes, ticks: list[float], words: Any) -> None:
    axes.set_xscale("log")
    axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: words(x)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def grid_views(panel: Panel) -> tuple[list[View], list[str]]:
    """Final loss of every series against the values of one setting, the lowest mean ringed.

    Args:
        panel: Of the kind ``grid``.
    """
    series = sorted(panel.series, key=lambda s: not s.baseline)
    looks = looks_of([(s.label, s.baseline) for s in series])
    figure, notes = new_figure(panels=1), []
    axes = figure.subplots()
    for s, (colour, style) in zip(series, looks, strict=True):
        name, values, losses = arm_name(s.label, s.ours), np.array(s.values, float), series_losses(panel, s)
        order = np.argsort(values)
        values, means = values[order], np.array([float(np.mean(losses[i])) for i in order])
        if not np.isfinite(means).any():
            notes.append(f"{name} diverged at every value.")
            continue
        diverged = [f"{x:g}" for x, mean in zip(values, means, strict=True) if not np.isfinite(mean)]
        notes += [f"{name} diverged at {', '.join(diverged)}."] if diverged else []
        best = int(np.nanargmin(means))
        if best in (0, len(values) - 1) and len(values) > 1:
            notes.append(f"The lowest loss of {name} is at the edge of its grid ({values[best]:g}).")
        for x, point in zip(values, (losses[i] for i in order), strict=True):
            axes.plot(np.full(len(point), x), point, ".", color=colour, alpha=0.45, markersize=5)
        label = f"{name}, lowest {means[best]:.4f} at {values[best]:g}"
        axes.plot(values, means, "o", linestyle=style, color=colour, linewidth=2, markersize=4, label=label)
        axes.plot(values[best], means[best], "o", markersize=13, markerfacecolor="none", markeredgecolor=colour)
    everything = sorted({float(x) for s in series for x in s.values})
    if everything[0] > 0:
        _log_axis(axes, everything, lambda x: f"{x:g}")
    axes.set_xlabel(axis_words(panel.spec.axis))
    axes.set_ylabel("final validation loss, nats per token")
    axes.set_title("Where is the optimum of each arm?")
    set_style(axes)
    return [_with_legend(figure, axes, panel.title)], notes


def _with_legend(figure: Figure, axes: Axes, title: str) -> View:
    names = axes.get_legend_handles_labels()[1]
    if names:
        legend_below(figure, axes, "mean of the seeds; the ring is the lowest")
    return View("grid", f"{title}: {'; '.join(names)}", figure)
