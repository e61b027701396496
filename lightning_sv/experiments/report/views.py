"""The pictures of a panel, from event files alone: one per question, small enough for a phone.

A baseline is blue and solid in every picture; what the paper does not have says "(ours)".
"""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from lightning_sv.analysis.losses import draw_differences, draw_losses
from lightning_sv.analysis.paired import on_common_tokens, paired_curve
from lightning_sv.analysis.run_plot import branch_norms, draw_branches
from lightning_sv.analysis.style import (
    LINES,
    colours,
    human_tokens,
    legend_below,
    new_figure,
    set_style,
    set_token_axis,
)
from lightning_sv.experiments.results import Arm, Panel
from lightning_sv.runs.events import VAL_LOSS, Curve

_END = 0.8


class View(NamedTuple):
    """One picture: a name for its file, words for those who cannot see it, the figure."""

    name: str
    alt: str
    figure: Figure

    def save(self, stem: Path) -> None:
        """Write ``stem``.png and ``stem``.svg; equal figures give equal bytes."""
        stem.parent.mkdir(parents=True, exist_ok=True)
        with rc_context({"svg.hashsalt": "lightning_sv"}):
            self.figure.savefig(f"{stem}.svg", metadata={"Date": None})
            self.figure.savefig(f"{stem}.png")


def arm_name(label: str, ours: bool) -> str:
    """What a legend calls an arm."""
    return f"{label} (ours)" if ours else label


def looks_of(arms: Sequence[tuple[str, bool]]) -> list[tuple[str, str]]:
    """(label, is the baseline) of every arm -> its colour and line style.

    The baseline has the colour that `colours` gives to llama, whatever its name.
    """
    names = [
        "llama"
        if baseline
        else f"{label}, not compared with"
        if label == "llama" and any(b for _, b in arms)
        else label
        for label, baseline in arms
    ]
    styles = cycle(LINES[1:])
    lines = ["-" if name == "llama" else next(styles) for name in names]
    return list(zip(colours(names), lines, strict=True))


def baseline_first(panel: Panel) -> list[Arm]:
    """The arms in their order, the baseline before them."""
    return sorted(panel.arms, key=lambda arm: not arm.baseline)


def curve_views(panel: Panel, confidence: float = 0.95) -> tuple[list[View], list[str]]:
    """Loss against tokens, the difference to the baseline, the end of training; notes on what cannot be drawn.

    Args:
        panel: Of the kind ``curves``; one without a baseline has no difference.
        confidence: Coverage of the bands.
    """
    arms = baseline_first(panel)
    looks = looks_of([(arm.label, arm.baseline) for arm in arms])
    names = [arm_name(arm.label, arm.ours) for arm in arms]
    curves = [[run.curve(VAL_LOSS) for run in arm.runs] for arm in arms]
    n = len(curves[0])
    seeds = f"mean of {n} seeds" if n > 1 else "one seed"
    ends = [f"{name}  {np.mean([run.val_loss for run in arm.runs]):.4f}" for name, arm in zip(names, arms, strict=True)]
    views = [
        _loss_view("loss", f"{panel.title}: validation loss", curves, names, looks, seeds, 0.2),
        _loss_view("end", f"{panel.title}: end of training", curves, ends, looks, f"at the end, {seeds}", _END),
    ]
    if not arms[0].baseline or len(arms) == 1:
        return views, []
    pairs, shown, notes = [], [], []
    for i, arm in enumerate(curves[1:], 1):
        if arms[i].runs[0].tokens != arms[0].runs[0].tokens:
            ends = [human_tokens(arms[j].runs[0].tokens) for j in (i, 0)]
            notes.append(
                f"{names[i]} ends at {ends[0]} tokens, {names[0]} at {ends[1]}: its difference, from end to end, is "
                "in the table alone."
            )
            continue
        try:
            pairs.append(paired_curve(curves[0], arm, confidence))
            shown.append(i)
        except ValueError as error:
            notes.append(f"{names[i]} - {names[0]} cannot be drawn: {error}")
    if pairs:
        figure = new_figure(panels=1)
        axes = figure.subplots()
        words = [names[0], *(names[i] for i in shown)]
        title = draw_differences(axes, pairs, words, [looks[i] for i in shown], n, confidence)
        axes.set_title("How far from the baseline?")
        set_token_axis(axes)
        set_style(axes)
        legend_below(figure, axes, title)
        ended = "; ".join(axes.get_legend_handles_labels()[1])
        views.insert(1, View("difference", f"{panel.title}: difference to {names[0]}: {ended}", figure))
    return views, notes


def _loss_view(
    name: str,
    alt: str,
    curves: Sequence[Sequence[Curve]],
    names: Sequence[str],
    looks: Sequence[tuple[str, str]],
    title: str,
    from_share: float,
) -> View:
    figure = new_figure(panels=1)
    axes = figure.subplots()
    ends = [float(curve.tokens[-1]) for arm in curves for curve in arm]
    draw_losses(axes, curves, names, looks, from_share * min(ends) / max(ends))
    axes.set_title("Which ends lowest?" if len(curves) > 1 else "How low does the loss get?")
    if name == "end":
        axes.set_xlim(from_share * min(ends), max(ends) * 1.01)
        axes.set_title(f"The last {1 - from_share:.0%} of training")
    set_token_axis(axes)
    set_style(axes)
    legend_below(figure, axes, title)
    return View(name, f"{alt}: {'; '.join(names)}", figure)


def branch_views(panel: Panel) -> tuple[list[View], list[str]]:
    """Growth of the Q, K and V norms against tokens, mean over the seeds: one picture an arm, on one scale.

    Args:
        panel: Of the kind ``qkv``; an arm whose runs have not logged branch norms gets a note instead.
    """
    found: list[tuple[str, Figure]] = []
    notes = []
    for arm in panel.arms:
        name = arm_name(arm.label, arm.ours)
        norms = [branch_norms(run) for run in arm.runs]
        if not all(norms):
            notes.append(f"{name} has no branch norms in its event files.")
            continue
        means = {}
        for projection in norms[0]:
            tokens, values = on_common_tokens([norm[projection] for norm in norms])
            means[projection] = Curve(tokens, values.mean(axis=0))
        figure = new_figure(panels=1)
        axes = figure.subplots()
        draw_branches(axes, means)
        axes.set_title(f"{name}: do Q, K and V grow together?" if len(name) < 15 else name)
        set_token_axis(axes)
        set_style(axes)
        found.append((name, figure))
    limits = np.array([figure.axes[0].get_ylim() for _, figure in found])
    views = []
    for i, (name, figure) in enumerate(found):
        axes = figure.axes[0]
        axes.set_ylim(limits[:, 0].min(), limits[:, 1].max())
        ends = "; ".join(axes.get_legend_handles_labels()[1])
        views.append(View(f"qkv{i + 1}", f"{panel.title}, {name}: {ends}", figure))
    return views, notes


def axis_words(axis: str) -> str:
    """``model.optim.lr`` -> what a reader calls it."""
    known: dict[str, str] = {"lr": "peak learning rate", "init_std": "standard deviation at initialization"}
    last = axis.rpartition(".")[2]
    return known.get(last, last)


def end_losses(arm: Arm) -> Any:
    """(n,) final validation losses, nats per token; NaN where a run diverged."""
    return np.array([run.val_loss for run in arm.runs], dtype=np.float64)
