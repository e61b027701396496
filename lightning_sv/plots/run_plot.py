"""Figure of one training run, complete or not, from its event files."""

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from lightning_sv.errors import NotTestableError
from lightning_sv.plots import style
from lightning_sv.runs.events import Curve, Run
from lightning_sv.runs.tags import TRAIN_LOSS, VAL_LOSS

_PROJECTIONS = {
    "q_proj": ("Q", style.BLUE, "-"),
    "k_proj": ("K", style.ORANGE, "--"),
    "v_proj": ("V", style.GREEN, "-."),
}


@style.plain_style
def draw_run(run: Run, path: str | Path) -> None:
    """Draw losses, and the growth of the Q, K and V branches if they were logged, against tokens.

    The norm of a branch is that of its effective weight (with its scale vectors), averaged over the
    layers, relative to its first logged value.

    Raises:
        NotTestableError: the run has logged neither a training nor a validation loss
    """
    if TRAIN_LOSS not in run.curves and VAL_LOSS not in run.curves:
        hint = "draw it once training has begun."
        raise NotTestableError(f"{run.dir} has logged no loss yet; {hint}")

    branches = branch_curves(run)
    n_panels = 2 if branches else 1
    figure = style.new_figure(panels=n_panels)
    panels = figure.subplots(1, n_panels, squeeze=False)[0]
    _draw_losses(panels[0], run)
    if branches:
        draw_branches(panels[1], branches)
    figure.suptitle(run.label, x=0.012, ha="left", fontsize=10, color=style.GREY)
    for axes in panels:
        style.set_token_axis(axes)
        style.set_style(axes)
    style.write_picture(figure, path)


def branch_curves(run: Run) -> dict[str, Curve]:
    """Return the logged norms of the effective q, k and v weights, averaged over the layers."""
    branches = {}
    for name in _PROJECTIONS:
        tag = f"branch_norm/mean/{name}/effective"
        if tag in run.curves:
            branches[name] = run.curve(tag)
    return branches


def _draw_losses(axes: Axes, run: Run) -> None:
    shown: list[Curve] = []
    if TRAIN_LOSS in run.curves:
        train = run.curve(TRAIN_LOSS)
        # centred, because a trailing mean lags behind the falling loss
        window = pd.Series(train.values).rolling(max(1, len(train.values) // 50), 1, center=True)
        smooth = window.mean().to_numpy()
        axes.plot(*train, color=style.SKY, linewidth=0.6, alpha=0.5)
        axes.plot(train.tokens, smooth, color=style.SKY, linewidth=1.8, label="train, running mean")
        shown = [Curve(train.tokens, smooth)]
    title = "How low is the loss?"
    if VAL_LOSS in run.curves:
        val = run.curve(VAL_LOSS)
        axes.plot(
            *val, "o-", color=style.VERMILLION, linewidth=1.8, markersize=3, label="validation"
        )
        shown.append(val)
        title += f" {run.val_loss:.3f} at {style.human_tokens(run.tokens)} tokens"
    style.set_limits(axes, shown, from_share=0.05)
    axes.set(ylabel="loss, nats per token", title=title)
    axes.legend(frameon=False, loc="upper right")


def draw_branches(axes: Axes, branches: Mapping[str, Curve]) -> None:
    """Draw norms of the Q, K and V branches relative to their start, against training tokens."""
    shown = []
    for name, curve in branches.items():
        symbol, colour, line = _PROJECTIONS[name]
        growth = curve.values / curve.values[0]
        label = f"{symbol}, x {growth[-1]:.2f} at the end"
        axes.plot(curve.tokens, growth, line, color=colour, linewidth=2, label=label)
        shown.append(Curve(curve.tokens, growth))
    axes.axhline(1, color=style.GREY, linewidth=1)
    style.set_limits(axes, shown, from_share=0.0, include=[1.0])
    axes.set(ylabel="norm of the branch / its start", title="Do Q, K and V grow together?")
    axes.legend(loc="best", edgecolor="none", framealpha=0.9)
