"""Plots of logged scalars: norms of Q, K and V, any scalar, copying."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from lightning_sv.errors import NotTestableError
from lightning_sv.experiments.arms import Arm
from lightning_sv.experiments.kinds.base import Drawing, LoadedPanel
from lightning_sv.experiments.report.copying import FORMED, GAIN
from lightning_sv.experiments.report.plot import Plot, finished, with_looks
from lightning_sv.plots import style
from lightning_sv.plots.run_plot import branch_curves, draw_branches
from lightning_sv.runs.events import Curve
from lightning_sv.statistics.paired import on_one_grid


def branch_plots(panel: LoadedPanel) -> Drawing:
    """Plot the growth of the Q, K and V norms, mean over the seeds: a plot per arm, one scale."""
    plots: list[Plot] = []
    notes = []
    for arm in panel.arms:
        if all(branch_curves(run) for run in arm.runs):
            plots.append(_branch_plot(panel.title, arm, number=len(plots) + 1))
        else:
            notes.append(f"{arm.name} has no branch norms in its event files.")
    _share_limits([plot.figure.axes[0] for plot in plots])
    return Drawing(plots, notes)


def _share_limits(every_axes: Sequence[Axes]) -> None:
    """Give all axes the lowest and the highest limit of any."""
    limits = [axes.get_ylim() for axes in every_axes]
    for axes in every_axes:
        axes.set_ylim(np.min(limits), np.max(limits))


def _branch_plot(title: str, arm: Arm, number: int) -> Plot:
    of_runs = [branch_curves(run) for run in arm.runs]
    means = {}
    for projection in of_runs[0]:
        tokens, values = on_one_grid([curves[projection] for curves in of_runs])
        means[projection] = Curve(tokens, values.mean(axis=0))

    figure = style.new_figure(panels=1)
    axes = figure.subplots()
    draw_branches(axes, means)
    axes.set_title(f"{arm.name}: do Q, K and V grow together?")
    style.set_token_axis(axes)
    style.set_style(axes)
    ends = "; ".join(axes.get_legend_handles_labels()[1])
    return Plot(f"qkv{number}", f"{title}, {arm.name}: {ends}", figure)


def scalar_plots(panel: LoadedPanel) -> Drawing:
    """Plot a scalar on logarithmic axes: geometric mean of the seeds, and a thin line per seed."""
    axes = style.new_axes()
    tag = panel.spec.tag
    notes = []
    for arm, look in with_looks(panel.arms):
        try:
            _draw_scalar(axes, arm, tag, look)
        except NotTestableError as error:
            notes.append(str(error))
    if not axes.lines:
        return Drawing(notes=notes)

    axes.set(title="Which ends lower?", xlabel="training tokens", ylabel=tag)
    style.set_log_axis(axes, "x", style.human_tokens)
    style.set_log_axis(axes, "y", "{:g}".format)
    count = max(len(arm.runs) for arm in panel.arms)
    seeds = "one seed"
    if count > 1:
        seeds = f"geometric mean of {count} seeds, a thin line per seed"
    return Drawing([finished("scalar", panel.title, axes, seeds)], notes)


def _draw_scalar(axes: Axes, arm: Arm, tag: str, look: style.Look) -> None:
    """Draw the scalar of an arm after the first step, on logarithmic axes.

    Raises:
        NotTestableError: a run has no value there, or one that is not above 0
    """
    tokens, values = on_one_grid([run.curve(tag) for run in arm.runs])
    later = tokens > 0
    shown = values[:, later]
    has_logarithms = shown.size > 0 and (shown > 0).all()
    if not has_logarithms:
        raise NotTestableError(f"{arm.name} is not drawn: {tag} is not above 0.")

    mean = np.exp(np.log(shown).mean(axis=0))
    label = f"{arm.name}  {mean[-1]:.3g} at the end"
    look_of_points: dict[str, Any] = {"marker": "o", "markersize": 3, "label": label}
    style.draw_seeds(axes, tokens[later], shown, mean, look, **look_of_points)


def copying_plot(panel: LoadedPanel) -> Plot:
    """Plot the gain on a second copy against tokens: a thick line per arm, a thin one per seed."""
    axes = style.new_axes()
    for arm, look in with_looks(panel.arms):
        tokens, values = on_one_grid([run.curve(GAIN) for run in arm.runs])
        mean = values.mean(axis=0)
        style.draw_seeds(axes, tokens, values, mean, look, label=f"{arm.name}  {mean[-1]:+.2f}")
    axes.axhline(0, color=style.GREY, linewidth=1, zorder=1)
    axes.axhline(FORMED, color=style.GREY, linewidth=1, linestyle=":", zorder=1)
    axes.set(
        title="When does each arm learn to copy?",
        ylabel="loss on a second copy − first, nats per token",
    )
    style.set_token_axis(axes)
    legend = "at the end; dotted: the circuit has formed"
    return finished("copying", f"{panel.title}: loss on text read twice", axes, legend)
