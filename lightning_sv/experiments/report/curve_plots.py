"""Plots of losses against tokens, and of their differences to the baseline."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from lightning_sv.errors import NotTestableError
from lightning_sv.experiments.arms import Arm, runs_of
from lightning_sv.experiments.claims.pooling import TWO_SIDED
from lightning_sv.experiments.kinds.base import Drawing, LoadedPanel
from lightning_sv.experiments.report.plot import Plot, finished, with_looks
from lightning_sv.plots import style
from lightning_sv.runs.events import Curve
from lightning_sv.runs.tags import VAL_LOSS
from lightning_sv.statistics.paired import PairedCurve, PairedDifference, on_one_grid, paired_curve
from lightning_sv.statistics.verdicts import EQUAL, NOT_RESOLVED, direction

#: share of the tokens by which points of different arms stand apart, so that no bar hides another
_STEP_ASIDE = 0.03
#: nats per token; a line that ends further from the number of its legend has a note
_APART = 5e-5


def curve_plots(panel: LoadedPanel) -> Drawing:
    """Plot loss against tokens, and the difference to the baseline; notes on missing parts."""
    differences, notes = _difference_plots(panel)
    return Drawing([_loss_plot(panel), *differences], notes)


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
    title = "How low does the loss get?"
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


class _Line(NamedTuple):
    """The difference of an arm to the baseline: against tokens, and at the end as in the table."""

    arm: Arm
    look: style.Look
    curve: PairedCurve
    end: PairedDifference

    @property
    def is_point(self) -> bool:
        """If True, the difference is known at the end alone."""
        return len(self.curve.tokens) == 1

    @property
    def ends_apart(self) -> bool:
        """If True, the line does not end at the number of its legend."""
        return bool(abs(self.end.mean - self.curve.mean[-1]) > _APART)

    @property
    def label(self) -> str:
        """Text of the legend: the name, the last difference, and its verdict if it is not clear."""
        label = f"{self.arm.name}  {self.end.mean:+.4f}"
        word = direction(self.end)
        if word in (EQUAL, NOT_RESOLVED) and self.end.has_interval:
            label += f", {word}"
        return label


def _difference_plots(panel: LoadedPanel) -> Drawing:
    """Plot the mean difference, with its interval, of arms that have the tokens of the baseline."""
    (baseline, _), *others = with_looks(panel.arms)
    if not baseline.baseline:
        return Drawing()

    lines = []
    notes = []
    for arm, look in others:
        try:
            lines.append(_line(panel, baseline, arm, look))
        except NotTestableError as error:
            notes.append(str(error))
    if not lines:
        return Drawing(notes=notes)

    for line in lines:
        if line.ends_apart:
            of_pairs = f"{line.arm.name}: the line is the mean of its pairs"
            notes.append(f"{of_pairs}; the number at its end also uses other pairs.")
    return Drawing([_difference_plot(panel.title, baseline, lines)], notes)


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


def _difference_plot(title: str, baseline: Arm, lines: Sequence[_Line]) -> Plot:
    axes = style.new_axes()
    axes.axhline(0, color=style.GREY, linewidth=1)
    shown = []
    for place, line in enumerate(lines, start=1):
        aside = 1 - _STEP_ASIDE * (len(lines) - place)  # the last one at its place
        _draw_difference(axes, line, aside)
        tokens, mean, low, high, _ = line.curve
        shown += [Curve(tokens, mean), Curve(tokens, low), Curve(tokens, high)]
    style.set_limits(axes, shown, from_share=0.2, include=[0.0])
    style.set_token_axis(axes)
    difference = f"difference to {baseline.name}"
    axes.set(title="How far from the baseline?", ylabel=f"{difference}, nats per token")
    return finished("difference", f"{title}: {difference}", axes, f"at the end; {_bands(lines)}")


def _bands(lines: Sequence[_Line]) -> str:
    """Return what the bands are: `band: 95% interval of 2 to 3 pairs`."""
    counts = [line.curve.n for line in lines]
    if max(counts) == 1:
        return "one pair: no interval, no verdict"
    mark = "band"
    if all(line.is_point for line in lines):
        mark = "bar"
    return f"{mark}: 95% interval of {count_range(counts)} pairs"


def _draw_difference(axes: Axes, line: _Line, aside: float) -> None:
    """Draw a line with a band, or a point with a bar at `aside` times its tokens."""
    colour, dashes = line.look
    look: dict[str, Any] = {
        "linestyle": dashes,
        "color": colour,
        "linewidth": 2,
        "label": line.label,
    }
    tokens, mean, low, high, _ = line.curve
    if not line.is_point:
        axes.fill_between(tokens, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(tokens, mean, **look)
        return
    end = line.end
    bar = end.smallest_resolvable if end.has_interval else None
    axes.errorbar(tokens * aside, [end.mean], bar, marker="o", capsize=3, **look)
