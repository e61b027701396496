"""Draws the pictures of the first page from the CSV files of results/: python results/draw.py.

docs/figures/layer.png                a branch with its vectors
docs/figures/gain.png                 the difference to llama during training
docs/figures/difference-by-std.png    the recorded differences to llama against the initial std
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs/figures"

#: arm -> colour of Okabe and Ito
COLOURS = {
    "unified": "#D55E00",
    "unified, dp at the lm_head": "#CC79A7",
    "hg+dp+or": "#009E73",
}
GAMMA_IN = "#cfe3f7"
GAMMA_OUT = "#fbdcc4"
GREY = "#555555"


@dataclass(frozen=True)
class Setting:
    """Recorded differences at one length, where all arms have one initial std.

    Attributes:
        folder: folder of results/
        figure: figure of the recording
        panels: start of the panels' names
        std: initial std of all arms
        tokens_per_param: training tokens per parameter
        model: name of the model
        text: what it is trained on
    """

    folder: str
    figure: str
    panels: str
    std: float
    tokens_per_param: int
    model: str
    text: str = "Python"


def std_best_for_llama(steps: int) -> float:
    """Return the tuned initial std of `llama` in `tiny` after this many steps."""
    tuned = yaml.safe_load((ROOT / f"conf/paper/tuned/tiny-{steps}.yaml").read_text())
    return float(tuned["arms"]["llama"]["model.backbone.init_std"])


BEST_FOR_LLAMA = ("own-optimum", "All arms at the optimum of llama")
SETTINGS = (
    Setting("gpu-25", "protocol", "Initial std 0.02", 0.02, 100, "mini"),
    Setting("cpu-mini", "parts", "Norms after the matrices", 0.02, 20, "mini"),
    Setting("cpu-100-protocol-lengths", "protocol-lengths", "7 tokens", 0.02, 7, "tiny"),
    Setting("cpu-100-protocol-lengths", "protocol-lengths", "27 tokens", 0.02, 27, "tiny"),
    Setting("cpu-100-protocol", "protocol", "Initial std 0.02", 0.02, 100, "tiny"),
    Setting("cpu-english", "english", "Initial std 0.02", 0.02, 100, "tiny", "English"),
    Setting("cpu-mini-english", "english", "Initial std 0.02", 0.02, 20, "mini", "English"),
    Setting("cpu-100-protocol", "protocol", "Initial std 0.55", 0.55 / 8, 100, "tiny"),
    Setting("cpu-100", *BEST_FOR_LLAMA, std_best_for_llama(45000), 100, "tiny"),
    Setting("cpu-long", *BEST_FOR_LLAMA, std_best_for_llama(12000), 27, "tiny"),
    Setting("cpu-long-one-setting", "param-ablation", "Parameters", 0.08, 27, "tiny"),
    Setting("cpu", *BEST_FOR_LLAMA, std_best_for_llama(3000), 7, "tiny"),
)
#: length -> colour
LENGTHS: dict[int, str] = {7: "#E69F00", 20: "#009E73", 27: "#56B4E9", 100: "#0072B2"}
MARKERS = {
    ("tiny", "Python"): "o",
    ("mini", "Python"): "D",
    ("tiny", "English"): "s",
    ("mini", "English"): "^",
}
MODEL_SIZES = {"tiny": "0.2 M", "mini": "1.05 M"}


def recorded_differences(setting: Setting) -> pd.DataFrame:
    """Return the final differences to llama of a setting, one row per arm of `COLOURS`."""
    rows = pd.read_csv(ROOT / "results" / setting.folder / "differences.csv")
    is_shown = (
        (rows.figure == setting.figure)
        & rows.panel.str.startswith(setting.panels)
        & (rows.quantity == "final loss")
        & (rows.baseline == "llama")
        & rows.arm.isin(list(COLOURS))
    )
    return rows[is_shown].drop_duplicates("arm").set_index("arm")


def all_points() -> pd.DataFrame:
    """Return every point of the picture of stds: its setting, arm, estimate, low and high."""
    points = []
    for setting in SETTINGS:
        for arm, row in recorded_differences(setting).iterrows():
            points.append(
                {
                    "std": setting.std,
                    "tokens_per_param": setting.tokens_per_param,
                    "model": setting.model,
                    "text": setting.text,
                    "arm": arm,
                    "estimate": row.estimate,
                    "low": row.low,
                    "high": row.high,
                }
            )
    return pd.DataFrame(points)


def draw_difference_by_std() -> Figure:
    """Draw the difference to llama against the initial std of all arms, and at each arm's own."""
    figure = Figure(figsize=(12.5, 4.4), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(COLOURS) + 1, sharey=True)
    points = all_points()
    for axes, arm in zip(panels, COLOURS, strict=False):
        draw_arm_by_std(axes, points[points.arm == arm])
        axes.set_title(arm, loc="left", fontsize=10, fontweight="bold")
    panels[0].set_ylabel("final loss − that of llama, nats per token")
    panels[1].set_xlabel("initial std of all arms, at a learning rate that is tuned for llama")
    draw_own_optimum(panels[-1])

    handles, labels = panels[0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    place = "outside lower left"
    figure.legend(unique.values(), unique.keys(), loc=place, ncols=3, frameon=False, fontsize=9)
    return figure


def draw_arm_by_std(axes: Axes, points: pd.DataFrame) -> None:
    """Draw the points of one arm; below zero the arm is better than llama."""
    style_difference_axes(axes)
    axes.axvline(0.02, color=GREY, linewidth=0.8, linestyle=":")
    axes.text(0.0205, 0.2, "0.02", color=GREY, fontsize=8)
    for _, same_std in points.groupby("std"):
        shifts = 1.12 ** (np.arange(len(same_std)) - (len(same_std) - 1) / 2)
        for shift, row in zip(shifts, same_std.itertuples(), strict=True):
            draw_point(axes, row.std * shift, row)
    axes.set_xscale("log")
    axes.set_xlim(0.0007, 0.15)
    axes.set_xticks([0.001, 0.01, 0.1], ["0.001", "0.01", "0.1"])


def draw_own_optimum(axes: Axes) -> None:
    """Draw the differences if each arm has the learning rate and std that are best for itself."""
    style_difference_axes(axes)
    points = pd.concat([own_optimum_of_tiny(), own_optimum_of_mini()])
    for place, arm in enumerate(COLOURS):
        of_arm = points[points.name == arm].sort_values("tokens_per_param")
        shifts = 0.2 * (np.arange(len(of_arm)) - (len(of_arm) - 1) / 2)
        for shift, row in zip(shifts, of_arm.itertuples(), strict=True):
            draw_point(axes, place + shift, row)
    names = [arm.replace(", ", ",\n").replace("dp at the", "dp at\nthe") for arm in COLOURS]
    axes.set_xticks(range(len(COLOURS)), names, fontsize=8)
    axes.set_xlim(-0.6, len(COLOURS) - 0.4)
    axes.set_title("each arm at its own rate and std", loc="left", fontsize=10, fontweight="bold")


def own_optimum_of_tiny() -> pd.DataFrame:
    """Return the differences of the arms of `tiny` at their own optimum, at three lengths."""
    rows = own_optimum("cpu-100", "horizon")
    arm_and_length = rows.arm.str.rpartition(", ")
    lengths = arm_and_length[2].str.partition(" ")[0].astype(float).round().astype(int)
    return rows.assign(
        name=arm_and_length[0], tokens_per_param=lengths, model="tiny", text="Python"
    )


def own_optimum_of_mini() -> pd.DataFrame:
    """Return the difference of the one arm of `mini` that was tuned."""
    rows = own_optimum("cpu-mini-own-optimum", "own-optimum-mini")
    return rows.assign(name=rows.arm, tokens_per_param=20, model="mini", text="Python")


def own_optimum(folder: str, figure: str) -> pd.DataFrame:
    """Return the final differences to llama of a recording, each arm at its own optimum."""
    rows = pd.read_csv(ROOT / "results" / folder / "differences.csv")
    is_shown = (
        (rows.figure == figure)
        & (rows.panel == "Each arm at its own optimum")
        & (rows.quantity == "final loss")
    )
    return rows[is_shown]


def style_difference_axes(axes: Axes) -> None:
    """Shade the half in which an arm is better than llama."""
    axes.axhspan(-1, 0, color="#f2f7f2", zorder=0)
    axes.axhline(0, color=GREY, linewidth=1)
    axes.set_ylim(-0.15, 0.22)
    axes.spines[["top", "right"]].set_visible(False)


def draw_point(axes: Axes, x: float, row: Any) -> None:
    """Draw one difference with its 95% interval."""
    size = MODEL_SIZES[row.model]
    axes.errorbar(
        x,
        row.estimate,
        yerr=[[row.estimate - row.low], [row.high - row.estimate]],
        color=LENGTHS[row.tokens_per_param],
        marker=MARKERS[row.model, row.text],
        markersize=6,
        capsize=3,
        linewidth=1.3,
        label=f"{size}, {row.tokens_per_param} tokens per parameter, {row.text}",
    )


def training_differences(arm: str) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens (N,) and differences to llama (seeds, N) during the training of `mini`."""
    runs = pd.read_csv(ROOT / "results/gpu-25/results.csv")
    runs = runs[runs.figure == "protocol"].drop_duplicates(["arm", "seed"])
    curves = runs.set_index(["arm", "seed"]).curve.map(parse_curve)
    seeds = sorted(set(curves[arm].index) & set(curves["llama"].index))
    tokens = curves[arm][seeds[0]][:, 0]
    differences = [curves[arm][seed][:, 1] - curves["llama"][seed][:, 1] for seed in seeds]
    return tokens, np.array(differences)


def parse_curve(text: str) -> np.ndarray:
    """Return the points (N, 2) of 'tokens:loss tokens:loss ...'."""
    points = [point.split(":") for point in text.split()]
    return np.array(points, dtype=float)


def draw_training(axes: Axes) -> None:
    """Draw the mean difference to llama during training, with a thin line per seed."""
    axes.axhline(0, color=GREY, linewidth=1.2)
    axes.text(101, 0.002, "llama", color=GREY, fontsize=10, ha="right")
    for arm, colour in COLOURS.items():
        tokens, differences = training_differences(arm)
        millions = tokens / 1e6
        mean = differences.mean(axis=0)
        for seed in differences:
            axes.plot(millions, seed, color=colour, linewidth=0.6, alpha=0.4)
        axes.plot(millions, mean, color=colour, linewidth=2.2)
        name = arm.replace("unified, dp at the lm_head", "unified-head-dp")
        gain = f"{mean[-1]:+.3f}".replace("-", "−")
        axes.text(
            millions[-1] + 1.5, mean[-1], f"{name}  {gain}", color=colour, fontsize=11, va="center"
        )
    axes.set_xlim(0, 106)
    axes.set_ylim(-0.105, 0.02)
    axes.set_xlabel("training tokens in millions; 100 per parameter at the end")
    axes.set_ylabel("validation loss − that of llama, nats per token")
    axes.spines[["top", "right"]].set_visible(False)


def draw_layer(axes: Axes) -> None:
    """Draw how llama, hg+dp+or and unified apply q, k and v to the residual stream x."""
    draw_branches(axes, 8.1, "llama", "one vector for q, k and v", shared=True, parts=("W",))
    draw_branches(
        axes,
        4.6,
        "hg+dp+or",
        "own vectors, before and after the matrix",
        shared=False,
        parts=("γ_in", "W", "γ_out"),
    )
    draw_branches(
        axes,
        1.1,
        "unified",
        "and a norm after the matrix",
        shared=False,
        parts=("γ_in", "W", "Norm", "γ_out"),
    )
    axes.set_xlim(0, 8.4)
    axes.set_ylim(-0.5, 10.1)
    axes.axis("off")


def draw_branches(
    axes: Axes, y: float, name: str, caption: str, *, shared: bool, parts: tuple[str, ...]
) -> None:
    """Draw the norm and the branches q, k and v of one strategy around height y."""
    axes.text(0, y + 1.5, name, fontsize=10.5, fontweight="bold")
    axes.text(1.75, y + 1.5, caption, fontsize=9.5, color=GREY)
    axes.text(0.1, y, "x", fontsize=11, va="center")
    x = draw_box(axes, 0.9, y, "Norm", "white", start=0.4)
    if shared:
        x = draw_box(axes, x + 0.35, y, "γ", GAMMA_IN, start=x)
    for letter, dy in (("q", 0.95), ("k", 0.0), ("v", -0.95)):
        end = x
        start_height = y
        for part in parts:
            end = draw_part(axes, end, y + dy, part, letter, start_height)
            start_height = y + dy
        axes.annotate(
            "", (end + 0.5, y + dy), (end, y + dy), arrowprops={"arrowstyle": "->", "color": GREY}
        )
        axes.text(end + 0.6, y + dy, letter, fontsize=11, va="center")


def draw_part(axes: Axes, x: float, y: float, part: str, letter: str, start_height: float) -> float:
    """Draw one part of a branch after position x, and return its right end."""
    fill = {"γ_in": GAMMA_IN, "γ_out": GAMMA_OUT, "W": "#e6e6e6", "Norm": "white"}[part]
    text = {"γ_in": "γ", "γ_out": "γ", "W": "W", "Norm": "Norm"}[part]
    if part != "Norm":
        text = f"{text}$_{letter}$"
    return draw_box(axes, x + 0.45, y, text, fill, start=x, start_height=start_height)


def draw_box(
    axes: Axes,
    x: float,
    y: float,
    text: str,
    fill: str,
    *,
    start: float,
    start_height: float | None = None,
) -> float:
    """Draw a box with its left end at x and a line to it, and return its right end."""
    width = 1.15 if text == "Norm" else 0.85
    from_height = y if start_height is None else start_height
    axes.plot([start, x], [from_height, y], color=GREY, linewidth=1, zorder=1)
    box = FancyBboxPatch(
        (x, y - 0.36),
        width,
        0.72,
        boxstyle="round,pad=0,rounding_size=0.12",
        facecolor=fill,
        edgecolor=GREY,
        zorder=2,
    )
    axes.add_patch(box)
    axes.text(x + width / 2, y, text, ha="center", va="center", fontsize=9.5, zorder=3)
    return x + width


def draw_alone(draw: Callable[[Axes], None]) -> Figure:
    """Return a picture of one of the two that stand next to each other."""
    figure = Figure(figsize=(6.2, 4.4), dpi=150, layout="constrained")
    draw(figure.subplots())
    return figure


def main() -> None:
    """Write all pictures."""
    draw_alone(draw_layer).savefig(FIGURES / "layer.png")
    draw_alone(draw_training).savefig(FIGURES / "gain.png")
    draw_difference_by_std().savefig(FIGURES / "difference-by-std.png")


if __name__ == "__main__":
    main()
