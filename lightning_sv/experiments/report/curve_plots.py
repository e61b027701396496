"""Plots of losses against tokens, and of their differences to the baseline."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from lightning_sv.errors import NotTestableError
from lightning_sv.experiments.arms import Arm, baseline_first, runs_of
from lightning_sv.experiments.claims.pooling import TWO_SIDED
from lightning_sv.experiments.kinds.base import Drawing, LoadedPanel
from lightning_sv.experiments.report.plot import Plot, finished, with_looks
from lightning_sv.plots import style
from lightning_sv.runs.events import Curve
from lightning_sv.runs.tags import VAL_LOSS
from lightning_sv.statistics.paired import PairedCurve, PairedDifference, on_one_grid, paired_curve
from lightning_sv.statistics.verdicts import EQUAL, NOT_RESOLVED, direction

#: share of the tokens by which the bars stand apart behind the end, so that none hides another
_STEP_ASIDE = 0.03


def curve_plots(panel: LoadedPanel) -> Drawing:
    """Plot loss against tokens, and the difference to the baseline; notes on missing parts."""
    lines, notes = _lines(panel)
    plots = [_loss_plot(panel)]
    if lines:
        plots.append(_difference_plot(panel, lines))
    return Drawing(plots, notes)


def _loss_plot(panel: LoadedPanel) -> Plot:
    axes = style.new_axes()
    for arm, look in with_looks(panel.arms):
        tokens, values = on_one_grid(arm.curves)
        label = f"{arm.name}  {arm.losses.mean():.4f}"
        # a recording may have only the last loss
        mark = "o" if len(tokens) == 1 else ""
        style.draw_seeds(axes, tokens, values, values.mean(axis=0), look, label=label, marker=mark)

    curves = [run.curve(VAL_LOSS) for run in runs_of(panel.arms)]
    ends = [float(curve.tokens[-1]) for curve in curves]
    # the y axis leaves out the losses of the first fifth of the shortest run
    style.set_limits(axes, curves, from_share=0.2 * min(ends) / max(ends))
    style.set_token_axis(axes)
    title = "How low is the loss?"
    if len(panel.arms) > 1:
        title = "Which ends lowest?"
    axes.set(title=title, ylabel="validation loss, nats per token")
    alt = panel.title
    if "validation loss" not in alt.lower():
        alt += ": validation loss"
    return finished("loss", alt, axes, f"at the end, {_seeds_text(panel.arms)}")


def _seeds_text(arms: Sequence[Arm]) -> str:
    """Return `one seed`, `mean of 3 seeds` or `mean of 2 to 3 seeds`."""
    counts = [len(arm.runs) for arm in arms]
    if max(counts) == 1:
        return "one seed"
    return f"mean of {count_range(counts)} seeds"


def count_range(counts: Sequence[int]) -> str:
    """Return `3` or `2 to 3`."""
    return " to ".join(dict.fromkeys([str(min(counts)), str(max(counts))]))


def interval_legend(counts: Sequence[int]) -> str:
    """Return what the intervals are, given the numbers of pairs of the differences."""
    if max(counts) == 1:
        return "one pair: no interval"
    return f"95% interval of {count_range(counts)} pairs"


class _Line(NamedTuple):
    """The difference of an arm to the baseline: of its pairs against tokens, and as in the table.

    The last one also uses other pairs of their pool, so the line may end at a different number.
    """

    arm: Arm
    look: style.Look
    curve: PairedCurve
    end: PairedDifference

    @property
    def label(self) -> str:
        """Text of the legend: the name, the last difference, and its verdict if it is not clear."""
        label = f"{self.arm.name}  {self.end.mean:+.4f}"
        word = direction(self.end)
        if word in (EQUAL, NOT_RESOLVED) and self.end.has_interval:
            label += f", {word}"
        return label


def _lines(panel: LoadedPanel) -> tuple[list[_Line], list[str]]:
    """Return the arms that can be drawn against the baseline, and why others cannot."""
    (baseline, _), *others = with_looks(panel.arms)
    lines: list[_Line] = []
    notes: list[str] = []
    if not baseline.baseline:
        return lines, notes
    for arm, look in others:
        try:
            lines.append(_line(panel, baseline, arm, look))
        except NotTestableError as error:
            notes.append(str(error))
    return lines, notes


def _line(panel: LoadedPanel, baseline: Arm, arm: Arm, look: style.Look) -> _Line:
    """Return the difference of two arms against tokens.

    Raises:
        NotTestableError: they end at different tokens, or share no evaluation
    """
    end = arm.runs[0].tokens
    end_of_baseline = baseline.runs[0].tokens
    if end != end_of_baseline:
        ends = f"{arm.name} ends at {style.human_tokens(end)} tokens, {baseline.name} at"
        only = "only the table has the difference of their final losses."
        raise NotTestableError(f"{ends} {style.human_tokens(end_of_baseline)}: {only}")
    try:
        a, b = panel.paired(baseline, arm)
        curve = paired_curve(a.curves, b.curves)
    except NotTestableError as error:
        raise NotTestableError(f"{arm.name} - {baseline.name} cannot be drawn: {error}") from error
    return _Line(arm, look, curve, panel.difference(arm, baseline, confidence=TWO_SIDED))


def _difference_plot(panel: LoadedPanel, lines: Sequence[_Line]) -> Plot:
    baseline, *_ = baseline_first(panel.arms)
    axes = style.new_axes()
    axes.axhline(0, color=style.GREY, linewidth=1)
    shown = []
    for place, line in enumerate(lines, start=1):
        shown += _draw_difference(axes, line, aside=_STEP_ASIDE * place)
    style.set_limits(axes, shown, from_share=0.2, include=[0.0])
    style.set_token_axis(axes)
    difference = f"difference to {baseline.name}"
    axes.set(title="How far from the baseline?", ylabel=f"{difference}, nats per token")
    legend = f"at the end; {interval_legend([line.curve.n for line in lines])}"
    return finished("difference", f"{panel.title}: {difference}", axes, legend)


def _draw_difference(axes: Axes, line: _Line, aside: float) -> list[Curve]:
    """Draw a line with its band, and the last difference with its bar; return what is shown."""
    colour, dashes = line.look
    tokens, mean, low, high, _ = line.curve
    axes.fill_between(tokens, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.plot(tokens, mean, color=colour, linestyle=dashes, linewidth=2, label=line.label)

    end = line.end
    place = (tokens[-1:] * (1 + aside)).astype(np.int64)
    half = np.nan_to_num(end.smallest_resolvable)  # no bar without an interval
    axes.errorbar(place, [end.mean], half, color=colour, marker="o", markersize=4, capsize=3)
    bar = [Curve(place, np.array([end.mean + sign * half])) for sign in (-1, 1)]
    return [Curve(tokens, mean), Curve(tokens, low), Curve(tokens, high), *bar]
