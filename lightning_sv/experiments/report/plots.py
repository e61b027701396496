"""Plots of panels: one per question. A baseline is blue and solid in each; arms that the paper lacks have "(ours)"."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any, TypeVar

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from lightning_sv.errors import NotTestableError
from lightning_sv.experiments.arms import Arm, Series
from lightning_sv.experiments.claims.pooling import TWO_SIDED
from lightning_sv.experiments.kinds.base import Drawing, LoadedPanel
from lightning_sv.experiments.report.copying import FORMED, GAIN
from lightning_sv.experiments.report.plot import Plot
from lightning_sv.plots import style
from lightning_sv.plots.gamma_plot import gamma_figure
from lightning_sv.plots.run_plot import branch_curves, draw_branches
from lightning_sv.runs.events import Curve, Run
from lightning_sv.statistics.optimum import Optimum
from lightning_sv.statistics.paired import PairedCurve, on_one_grid, paired_curve
from lightning_sv.statistics.scaling import ScalingFit
from lightning_sv.statistics.verdicts import EQUAL, NOT_RESOLVED, direction

# strategies that have the same colour in every figure; the others take free colours
_FIXED = {"llama": style.BLUE, "unified": style.VERMILLION, "hg+dnp+or+iwd": style.VERMILLION, "nop": style.PURPLE}
_FREE = (style.VERMILLION, style.GREEN, style.PURPLE, style.SKY, style.ORANGE)
_DOTS = (0, (1, 3))
_LOSS = "final validation loss, nats per token"
_ArmOrSeries = TypeVar("_ArmOrSeries", Arm, Series)


def finished(name: str, alt: str, axes: Axes, legend: str) -> Plot:
    """Style the axes, add the legend below, and return the plot; its text ends with the names of the lines."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    style.set_style(axes)
    style.legend_below(figure, axes, legend)
    return Plot(name, f"{alt}: {'; '.join(axes.get_legend_handles_labels()[1])}", figure)


def with_looks(arms: Sequence[_ArmOrSeries]) -> list[tuple[_ArmOrSeries, tuple[str, str]]]:
    """Return each arm, the baseline first, with its colour and line style; the baseline has those of llama."""
    arms = sorted(arms, key=lambda arm: not arm.baseline)
    other = "llama, not the baseline" if any(arm.baseline for arm in arms) else "llama"
    names = ["llama" if arm.baseline else other if arm.label == "llama" else arm.label for arm in arms]
    styles = cycle(style.LINES[1:])
    lines = ["-" if name == "llama" else next(styles) for name in names]
    fixed = [_FIXED.get(name) for name in names]
    free = cycle([colour for colour in _FREE if colour not in fixed])
    colours = [next(free) if colour is None else colour for colour in fixed]
    return list(zip(arms, zip(colours, lines, strict=True), strict=True))


def curve_plots(panel: LoadedPanel) -> Drawing:
    """Plot loss against tokens, and the difference to the baseline; notes on missing parts."""
    arms, axes = panel.arms, style.new_figure(panels=1).subplots()
    difference, notes = _difference_plot(panel)
    for arm, look in with_looks(arms):
        tokens, values = on_one_grid(arm.curves)
        mark = {"marker": "o"} if len(tokens) == 1 else {}  # a recording may have only the last loss
        label = f"{arm.name}  {arm.losses.mean():.4f}"
        style.draw_seeds(axes, tokens, values, values.mean(axis=0), look, label=label, **mark)
    curves = [curve for arm in arms for curve in arm.curves]
    ends = [float(curve.tokens[-1]) for curve in curves]
    style.set_limits(axes, curves, 0.2 * min(ends) / max(ends))
    axes.set_ylabel("validation loss, nats per token")
    axes.set_title("Which ends lowest?" if len(arms) > 1 else "How low does the loss get?")
    style.set_token_axis(axes)
    counts = [len(arm.runs) for arm in arms]
    several = " to ".join(dict.fromkeys(map(str, (min(counts), max(counts)))))
    seeds = "one seed" if max(counts) == 1 else f"mean of {several} seeds"
    loss = finished("loss", f"{panel.title}: validation loss", axes, f"at the end, {seeds}")
    return Drawing([loss, *difference], notes)


def _difference_plot(panel: LoadedPanel) -> Drawing:
    """Plot the mean difference, with its interval, of arms that have the tokens of the baseline."""
    (base, _), *others = with_looks(panel.arms)
    if not base.baseline:
        return Drawing()
    pairs, notes = list[tuple[Arm, tuple[str, str], PairedCurve]](), []
    for arm, look in others:
        if arm.runs[0].tokens != base.runs[0].tokens:
            ends = [style.human_tokens(each.runs[0].tokens) for each in (arm, base)]
            notes.append(
                f"{arm.name} ends at {ends[0]} tokens, {base.name} at {ends[1]}: only the table has the difference "
                "of their final losses."
            )
            continue
        try:
            a, b = panel.paired(base, arm)
            pairs.append((arm, look, paired_curve(a.curves, b.curves)))
        except NotTestableError as error:
            notes.append(f"{arm.name} - {base.name} cannot be drawn: {error}")
    if not pairs:
        return Drawing(notes=notes)
    axes = style.new_figure(panels=1).subplots()
    axes.axhline(0, color=style.GREY, linewidth=1)
    counts = sorted({pair.n for _, _, pair in pairs})
    for arm, (colour, line_style), pair in pairs:
        end = panel.difference(arm, base, confidence=TWO_SIDED)  # as in the table
        if abs(end.mean - pair.mean[-1]) > 5e-5:
            notes.append(f"{arm.name}: the line is the mean of its pairs; the number at its end also uses other pairs.")
        label = f"{arm.name}  {end.mean:+.4f}"
        label += "" if len(counts) == 1 else ", one pair" if pair.n == 1 else f", {pair.n} pairs"
        word = direction(end)
        label += f", {word}" if word in (EQUAL, NOT_RESOLVED) and end.low is not None else ""
        style_of: dict[str, Any] = {"linestyle": line_style, "color": colour, "linewidth": 2, "label": label}
        if len(pair.tokens) == 1:
            bar = None if end.low is None or end.high is None else [[end.mean - end.low], [end.high - end.mean]]
            axes.errorbar(pair.tokens, [end.mean], bar, marker="o", capsize=3, **style_of)
            continue
        axes.fill_between(pair.tokens, pair.low, pair.high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(pair.tokens, pair.mean, **style_of)
    axes.set(title="How far from the baseline?", ylabel=f"difference to {base.name}, nats per token")
    lines = [Curve(pair.tokens, values) for _, _, pair in pairs for values in (pair.mean, pair.low, pair.high)]
    style.set_limits(axes, lines, from_share=0.2, include=0.0)
    style.set_token_axis(axes)
    several = f"{counts[0]} to " if len(counts) > 1 else ""
    drawn = "band" if any(len(pair.tokens) > 1 for _, _, pair in pairs) else "bar"
    band = f"{drawn}: 95% interval of {several}{counts[-1]} pairs"
    legend = f"at the end; {'one pair: no interval, no verdict' if counts == [1] else band}"
    plots = [finished("difference", f"{panel.title}: difference to {base.name}", axes, legend)]
    return Drawing(plots, notes)


def branch_plots(panel: LoadedPanel) -> Drawing:
    """Plot the growth of the Q, K and V norms against tokens, mean over the seeds: one plot per arm, on one scale."""
    plots, notes = list[Plot](), list[str]()
    for arm in panel.arms:
        norms = [branch_curves(run) for run in arm.runs]
        if not all(norms):
            notes.append(f"{arm.name} has no branch norms in its event files.")
            continue
        means = {}
        for projection in norms[0]:
            tokens, values = on_one_grid([norm[projection] for norm in norms])
            means[projection] = Curve(tokens, values.mean(axis=0))
        figure = style.new_figure(panels=1)
        axes = figure.subplots()
        draw_branches(axes, means)
        axes.set_title(f"{arm.name}: do Q, K and V grow together?" if len(arm.name) < 15 else arm.name)
        style.set_token_axis(axes)
        style.set_style(axes)
        ends = "; ".join(axes.get_legend_handles_labels()[1])
        plots.append(Plot(f"qkv{len(plots) + 1}", f"{panel.title}, {arm.name}: {ends}", figure))
    limits = [limit for plot in plots for limit in plot.figure.axes[0].get_ylim()]
    for plot in plots:
        plot.figure.axes[0].set_ylim(min(limits), max(limits))
    return Drawing(plots, notes)


def scalar_plots(panel: LoadedPanel) -> Drawing:
    """Plot a logged scalar against tokens on logarithmic axes: geometric mean of the seeds, a thin line per seed."""
    axes = style.new_figure(panels=1).subplots()
    tag, notes = panel.spec.tag, []
    for arm, look in with_looks(panel.arms):
        if not all(tag in run.curves for run in arm.runs):
            notes.append(f"{arm.name} has no {tag} in its event files.")
            continue
        tokens, values = on_one_grid([run.curve(tag) for run in arm.runs])
        later = tokens > 0  # the axis is logarithmic
        if not later.any() or not (values > 0).all():
            notes.append(f"{arm.name} is not drawn: {tag} is not above 0, or was only logged before the first step.")
            continue
        mean, mark = np.exp(np.log(values).mean(0))[later], {"marker": "o", "markersize": 3}
        label = f"{arm.name}  {mean[-1]:.3g} at the end"
        style.draw_seeds(axes, tokens[later], values[:, later], mean, look, label=label, **mark)
    if not axes.lines:
        return Drawing(notes=notes)
    axes.set(title="Which ends lower?", xlabel="training tokens", ylabel=tag)
    style.set_log_axis(axes, "x", style.human_tokens)
    style.set_log_axis(axes, "y", "{:g}".format)
    n = max(len(arm.runs) for arm in panel.arms)
    seeds = f"geometric mean of {n} seeds, a thin line per seed" if n > 1 else "one seed"
    return Drawing([finished("scalar", panel.title, axes, seeds)], notes)


def copying_plot(panel: LoadedPanel) -> Plot:
    """Plot the gain on a second copy against tokens: a thick line per arm, a thin one per seed."""
    axes = style.new_figure(panels=1).subplots()
    for arm, look in with_looks(panel.arms):
        tokens, values = on_one_grid([run.curve(GAIN) for run in arm.runs])
        mean = values.mean(0)
        style.draw_seeds(axes, tokens, values, mean, look, label=f"{arm.name}  {mean[-1]:+.2f}")
    axes.axhline(0, color=style.GREY, linewidth=1, zorder=1)
    axes.axhline(FORMED, color=style.GREY, linewidth=1, linestyle=":", zorder=1)
    axes.set(title="When does each arm learn to copy?", ylabel="loss on a second copy − first, nats per token")
    style.set_token_axis(axes)
    legend = "at the end; dotted: the circuit has formed"
    return finished("copying", f"{panel.title}: loss on text read twice", axes, legend)


def scaling_plots(panel: LoadedPanel) -> Drawing:
    """Plot loss against size with both laws, the difference to the baseline at each size, and the curves of each size.

    Each fit is of two arms; the curve of the baseline is that of the first fit.
    """
    fits, notes = panel.fits
    plots = [_fit_plot(panel, fits)]
    if fits:
        plots.append(gap_plot(panel, fits))
    for size in panel.sizes:
        arms = tuple(replace(arm, label=arm.series) for arm in panel.arms if arm.size == size)
        spec = replace(panel.spec, title=f"{panel.title}, {size}", kind="curves")
        drawn, lacking = curve_plots(LoadedPanel(spec, arms, arms, panel.pool))
        plots += [plot._replace(name=f"{plot.name}-{size}") for plot in drawn]
        notes += lacking
    return Drawing(plots, notes)


def _fit_plot(panel: LoadedPanel, fits: Mapping[str, list[ScalingFit]]) -> Plot:
    axes = style.new_figure(panels=1).subplots()
    for series, (colour, line_style) in with_looks(panel.series):
        sizes = np.array(series.values, float)
        for size, arm in zip(sizes, series.arms, strict=True):
            axes.plot(np.full(len(arm.runs), size), arm.losses, ".", color=colour, alpha=0.45, markersize=5)
        axes.plot(sizes, [arm.losses.mean() for arm in series.arms], "o", color=colour, markersize=6, label=series.name)
        forms = next(iter(fits.values()), []) if series.baseline else fits.get(series.label, [])
        grid = _around(sizes)
        for form in forms:
            law, power = form.a if series.baseline else form.b, form.form == "power"
            label = law.formula() if power or len(forms) == 1 else None
            line, width = (line_style, 2.0) if power else (_DOTS, 1.2)
            axes.plot(grid, law(grid), linestyle=line, color=colour, linewidth=width, label=label)
    axes.plot([], [], linestyle=_DOTS, color=style.GREY, linewidth=1.2, label="linear in ln N")
    axes.set(title="How does the loss fall with size?", ylabel=_LOSS)
    style.set_log_axis(axes, "x", style.human_tokens)
    axes.set_xlabel("parameters")
    return finished("fit", panel.title, axes, "N: the size; means of the seeds, fits of least squares")


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


def gap_plot(panel: LoadedPanel, fits: Mapping[str, list[ScalingFit]], words: PointWords = SIZES) -> Plot:
    """Plot the difference to the baseline at each point, with that of the fitted laws, or with lines between points."""
    if panel.baseline is None:
        raise NotTestableError("the baseline lacks runs.")
    (base, _), *others = with_looks(panel.series)
    axes = style.new_figure(panels=1).subplots()
    axes.axhline(0, color=style.GREY, linewidth=1, zorder=1)  # behind the curves
    for i, (series, (colour, line_style)) in enumerate(others):
        if fits and series.label not in fits:
            continue
        pairs = [panel.difference(*of, confidence=TWO_SIDED) for of in zip(series.arms, base.arms, strict=True)]
        half = [pair.smallest_resolvable or 0.0 for pair in pairs]
        along = np.array(base.values) * 1.03**i  # side by side, so that intervals do not overlap
        label = f"{series.name}  {pairs[-1].mean:+.3f} at {style.human_tokens(base.values[-1])}"
        look: dict[str, Any] = {"color": colour, "linestyle": "" if fits else line_style}
        axes.errorbar(along, [pair.mean for pair in pairs], yerr=half, marker="o", capsize=3, label=label, **look)
        grid = _around(along)
        for form in fits[series.label] if fits else ():
            line = line_style if form.form == "power" else _DOTS
            axes.plot(grid, form.b(grid) - form.a(grid), linestyle=line, color=colour, linewidth=1.5)
    style.set_log_axis(axes, "x", style.human_tokens)
    if words.ticks:
        axes.set_xticks(base.values, map(style.human_tokens, base.values))
    axes.set_title(f"The difference by {words.by}\n{panel.title}")
    axes.set_xlabel(words.axis)
    axes.set_ylabel(f"difference to {base.label}, nats per token")
    n = len(base.arms[0].runs)
    legend = f"95% interval of {n} pairs{'; lines: fits' if fits else ''}" if n > 1 else "one pair: no interval"
    return finished(words.name, f"{panel.title}, difference to {base.label}", axes, legend)


def _around(sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 100 sizes, from 10% below to 10% above those of a series."""
    return np.geomspace(sizes.min() / 1.1, sizes.max() * 1.1, 100)


def grid_plots(panel: LoadedPanel) -> Drawing:
    """Plot the final loss of each arm against each setting, the others at their best, and its optimum with errors."""
    optima = {series.name: series.optimum for series in panel.series}
    notes = [
        f"{name} has no fitted optimum: {found.why_not} ({', '.join(f'{value:g}' for value in found.values)})."
        for name, found in optima.items()
        if found.why_not
    ]
    varied = [(k, key) for k, key in enumerate(panel.spec.axes) if len({arm.point[k] for arm in panel.arms}) > 1]
    return Drawing([_profile_plot(panel, k, key, optima) for k, key in varied], notes)


def _profile_plot(panel: LoadedPanel, k: int, key: str, optima: dict[str, Optimum]) -> Plot:
    axes = style.new_figure(panels=1).subplots()
    for series, (colour, line_style) in with_looks(panel.series):
        lowest: dict[float, NDArray[np.float64]] = {}
        for arm in series.arms:
            if arm.point[k] not in lowest or arm.losses.mean() < lowest[arm.point[k]].mean():
                lowest[arm.point[k]] = arm.losses
        values = sorted(lowest)
        for x in values:
            axes.plot(np.full(len(lowest[x]), x), lowest[x], ".", color=colour, alpha=0.45, markersize=5)
        best = optima[series.name]
        label = f"{series.name}: {best.loss:.4f} at {best.values[k]:.3g}"
        means = [lowest[x].mean() for x in values]
        axes.plot(values, means, "o", linestyle=line_style, color=colour, linewidth=2, markersize=4, label=label)
        if not best.why_not:
            off = best.values[k] * np.exp([-best.errors[k], best.errors[k]])
            axes.plot(off, [best.loss] * 2, "-", color=colour, linewidth=1.2)
            axes.plot(best.values[k], best.loss, "o", markersize=13, markerfacecolor="none", markeredgecolor=colour)
    style.set_log_axis(axes, "x", "{:g}".format)
    axes.set(xlabel=axis_words(key), ylabel=_LOSS, title="Where is the optimum of each arm?")
    others = ", the other settings at their best" if len(panel.spec.axes) > 1 else ""
    legend = f"mean of the seeds{others};\nring: the fitted optimum, with its standard error"
    return finished(key.rpartition(".")[2], f"{panel.title}, {axis_words(key)}", axes, legend)


def axis_words(axis: str) -> str:
    """Return the label of an axis, e.g. of `model.optim.lr`."""
    last = axis.rpartition(".")[2]
    return {"lr": "peak learning rate", "init_std": "standard deviation at initialization"}.get(last, last)


def gamma_plot(run: Run) -> Plot:
    """Plot the rms of gamma of one run by layer and training tokens."""
    return Plot("gamma", f"rms of γ by layer and training tokens: {run.label}", gamma_figure(run))
