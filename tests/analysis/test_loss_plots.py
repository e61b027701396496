"""Figures: written, the right size, honest titles, one colour for the baseline."""

import os
import subprocess
import sys
from importlib import import_module
from inspect import signature
from pathlib import Path
from pkgutil import iter_modules

import numpy as np
import pytest
from matplotlib import rcParams
from matplotlib.image import imread

from lightning_sv import analysis
from lightning_sv.analysis import loss_plots, run_plot, style
from lightning_sv.analysis.run_plot import draw_run
from lightning_sv.analysis.style import save
from lightning_sv.experiments.report.write import write_report
from lightning_sv.runs.events import Curve, Run


def synthetic(label: str, seed: int, gain: float, branches: bool = True) -> Run:
    """A run that looks like one: power-law losses with noise, Q and K growing, V shrinking."""
    rng = np.random.default_rng(seed)
    tokens = np.arange(512, 1_536_001, 512, dtype=np.int64)
    x = tokens / tokens[-1]
    train = 3.2 + 4 * np.exp(-25 * x) - 0.9 * x**0.4 + 0.5 + rng.normal(0, 0.08, len(x))
    at = tokens[99::100]
    share = at / tokens[-1]
    noise = 0.01 * seed + rng.normal(0, 0.004, len(at))
    val = 3.7 + 4 * np.exp(-25 * share) - 0.9 * share**0.4 + gain * (share - 0.2) + noise
    curves = {"train/loss": Curve(tokens, train), "val/loss": Curve(at, val)}
    if branches:
        for name, end in (("q_proj", 8.8), ("k_proj", 8.6), ("v_proj", 3.3)):
            growth = 5.1 + (end - 5.1) * np.sqrt(x)
            curves[f"branch_norm/mean/{name}/effective"] = Curve(tokens, growth)
    return Run(Path("synthetic"), label, {}, {}, curves)


@pytest.mark.parametrize("label", ["$$", "price $5$", r"a $\alpha"])
def test_a_dollar_in_a_label_is_a_dollar(label: str, tmp_path: Path) -> None:
    run = synthetic(label, 0, 0.0)
    loss_plots.draw_comparison([[run], [run]], tmp_path / "c.png", labels=(label, "b"))
    figure = style.new_figure(1)
    axes = figure.subplots()
    axes.set(xscale="log", xlim=(1, 1e9), title=label)
    figure.savefig(tmp_path / "t.png")
    assert not axes.title.get_parse_math()
    assert all(tick.label1.get_parse_math() for tick in axes.xaxis.get_major_ticks())  # 10^3


@pytest.mark.parametrize(
    ("tokens", "words"), [(0, "0"), (512, "512"), (1_536_000, "1.5M"), (999_999, "1M"), (25_000, "25k"), (2e10, "20B")]
)
def test_human_tokens(tokens: float, words: str) -> None:
    """Token counts as a reader says them."""
    assert style.human_tokens(tokens) == words


def test_the_baseline_keeps_its_colour() -> None:
    """`llama` is blue on either side, and two arms never share a colour."""
    labels = ["llama", "unified", "nop", "hg+or", "dp", "llama lr=6e-3"]
    for other in labels[1:]:
        assert style.colours(["llama", other])[0] == style.BLUE == style.colours([other, "llama"])[1]
    for a in labels:
        for b in labels:
            assert a == b or len(set(style.colours([a, b]))) == 2
    four = style.colours(["wd", "iwd", "owd", "nowd"])
    assert four[0] == style.BLUE and len(set(four)) == 4  # blue is the baseline's where no llama is


@pytest.mark.parametrize(
    ("seeds", "gain", "answer"),
    [(3, -0.1, "How far from llama? unified lower"), (3, 0.0, "Not resolved"), (1, -0.1, "one pair: no interval")],
)
def test_comparison_says_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seeds: int, gain: float, answer: str
) -> None:
    """The title states which arm ends lower, the early drop is cropped, ticks read 0.5M."""
    figures = []
    monkeypatch.setattr(loss_plots, "save", lambda f, path: (figures.append(f), save(f, path)))
    runs_a = [synthetic("llama", k, 0.0) for k in range(seeds)]
    runs_b = [synthetic("unified", 10 + k, gain) for k in range(seeds)]
    for k, run in enumerate(runs_b):  # pairs share the seed's offset
        run.curve("val/loss").values[:] -= 0.01 * (10 + k) - 0.01 * k
    loss_plots.draw_comparison([runs_a, runs_b], tmp_path / "deep" / "c.png")
    assert imread(tmp_path / "deep" / "c.png").shape[:2] == (600, 1500)
    left, right = figures[0].axes
    words = right.get_title(loc="left") + " " + right.get_legend().get_title().get_text()
    assert answer in words
    assert left.get_ylim()[1] < 4.5 and right.get_ylim()[0] < 0 < right.get_ylim()[1]
    assert "0.5M" in [tick.get_text() for tick in left.get_xticklabels()]
    with pytest.raises(ValueError, match="one run per seed"):
        loss_plots.draw_comparison([runs_a, []], tmp_path / "c.png")


@pytest.mark.parametrize(
    ("seeds", "labels", "answer", "legend"),
    [
        (3, ("wd", "iwd", "owd", "nowd"), "How far from wd? iwd lower, owd higher", "nowd  {}, not resolved"),
        (1, ("wd", "iwd", "owd", "nowd"), "How far from wd? One pair, no verdict", "nowd  {}"),
        (3, ("wd", "iwd", "owd,weight_decay=0.05", "nowd"), "How far from A? B lower, C higher", "D  {}, not resolved"),
        (3, ("hg+dp+or", "hg+dnp+or", "hg+dnp+or+owd", "hg+dnp+or+wd"), "1 lower, 1 higher", "{}, not resolved"),
    ],
)
def test_several_arms_against_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seeds: int, labels: tuple[str, ...], answer: str, legend: str
) -> None:
    """Every arm has its own look in both panels, its end in the legend, and no text covers a line."""
    figures = []
    monkeypatch.setattr(loss_plots, "save", lambda f, path: (figures.append(f), save(f, path)))
    arms = [[synthetic(f"arm{i}", k, gain) for k in range(seeds)] for i, gain in enumerate((0.0, -0.1, 0.1, 0.0))]
    rng = np.random.default_rng(7)
    for run in (run for arm in arms for run in arm):
        run.curve("val/loss").values[:] += rng.normal(0, 0.004, len(run.curve("val/loss").values))
    loss_plots.draw_comparison(arms, tmp_path / "c.png", labels=labels)
    left, right = figures[0].axes
    assert answer in right.get_title(loc="left")
    looks = [[(line.get_color(), line.get_linestyle()) for line in axes.lines] for axes in (left, right)]
    means = [look for line, look in zip(left.lines, looks[0], strict=True) if line.get_linewidth() == 2]
    assert len({colour for colour, _ in means}) == len({style for _, style in means}) == 4
    assert looks[1][1:] == means[1:]  # after the line at zero
    ends = [line.get_ydata()[-1] for line in right.lines[1:]]
    words = right.get_legend_handles_labels()[1]
    assert f"{ends[0]:+.4f}" in words[0]
    assert words[2].endswith(legend.format(f"{ends[2]:+.4f}"))
    boxes = [text.get_window_extent() for text in (right.get_legend(), *figures[0].legends)]
    for line in (line for axes in (left, right) for line in axes.lines):
        late = line.get_transform().transform(line.get_xydata()) if len(line.get_xydata()) > 2 else []
        assert not any(box.contains(*point) for box in boxes for point in late)
    long = max(map(len, labels)) > 14
    assert len(figures[0].legends) == long and (left.get_legend() is None) == long


@pytest.mark.parametrize("panels", [1, 2])
@pytest.mark.parametrize("name", ["+" * 14, "WW+WW+WW+WW+WW"])
def test_no_title_is_cut(tmp_path: Path, panels: int, name: str) -> None:
    """Titles and labels of any words stay in the picture, and in their panel."""
    figure = style.new_figure(panels)
    for axes in figure.subplots(1, panels, squeeze=False)[0]:
        axes.plot([0, 1], [-0.00001, 0.00002])
        axes.set(title=f"How far from {name}? {name} ends 0.0123 lower\nand more", ylabel=f"{name} - {name}, nats")
    style.save(figure, tmp_path / "a.png")
    for i, axes in enumerate(figure.axes):
        title, label = axes._left_title, axes.yaxis.label  # type: ignore[attr-defined]
        assert title.get_text().split() == f"How far from {name}? {name} ends 0.0123 lower and more".split()
        assert title.get_window_extent().x1 <= figure.bbox.width * (i + 1) / panels
        assert title.get_window_extent().y1 <= figure.bbox.height
        assert label.get_window_extent().y0 >= 0 and label.get_window_extent().y1 <= figure.bbox.height


def test_a_run_with_and_without_branch_norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two panels with branch norms, whose title gives their growth; one panel without."""
    figures = []
    monkeypatch.setattr(run_plot, "save", lambda f, path: (figures.append(f), save(f, path)))
    run = synthetic("llama", 0, 0.0)
    draw_run(run, tmp_path / "two.png")
    grown = 8.8 / run.curve("branch_norm/mean/q_proj/effective").values[0]
    assert f"Q, x {grown:.2f} at the end" in figures[0].axes[1].get_legend_handles_labels()[1]
    assert "at 1.5M tokens" in " ".join(figures[0].axes[0].get_title(loc="left").split())
    draw_run(synthetic("llama", 0, 0.0, branches=False), tmp_path / "one.png")
    assert len(figures[1].axes) == 1
    with pytest.raises(ValueError, match="no loss yet"):
        draw_run(Run(Path("x"), "llama", {}, {}, {}), tmp_path / "none.png")


def test_running_mean_is_centred_and_skips_what_diverged() -> None:
    """Against numpy's convolution inside; a NaN does not spread."""
    values = np.random.default_rng(0).normal(size=20)
    inside = np.convolve(values, np.ones(5) / 5, mode="valid")
    assert run_plot._running_mean(values, 5)[2:-2] == pytest.approx(inside)
    assert run_plot._running_mean(values, 1) == pytest.approx(values)
    values[7] = np.nan
    assert np.isfinite(run_plot._running_mean(values, 5)).all()


def test_a_difference_of_one_point_is_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording may hold the last losses alone: they and their intervals are seen, side by side."""
    figures = []
    monkeypatch.setattr(loss_plots, "save", lambda f, path: figures.append(f))
    arms = [[synthetic(f"arm{i}", 3 * i + k, 0.1 * i) for k in range(3)] for i in range(3)]
    for run in (run for arm in arms for run in arm):
        run.curves["val/loss"] = Curve(*(values[-1:] for values in run.curve("val/loss")))
    loss_plots.draw_comparison(arms, tmp_path / "c.png", labels=("a", "b", "c"))
    left, right = figures[0].axes
    assert [line.get_marker() for line in left.lines if line.get_linewidth() == 2] == ["o"] * 3
    bars = [bar.get_children() for bar in right.containers]
    assert len(bars) == 2 and len({float(marker.get_xdata()[0]) for marker, *_ in bars}) == 2
    for _, low, high, *_ in bars:
        assert low.get_ydata()[0] < high.get_ydata()[0]


def test_no_setting_of_the_user_reaches_a_picture(tmp_path: Path) -> None:
    """What the program around ours has set stays as it is."""
    run = synthetic("llama", 0, 0.0, branches=False)
    with pytest.MonkeyPatch.context() as patch:
        theirs = {"text.usetex": True, "font.size": 40.0, "savefig.dpi": 20, "savefig.bbox": "tight", "axes.grid": True}
        for key, value in theirs.items():
            patch.setitem(rcParams, key, value)
        draw_run(run, tmp_path / "theirs.png")
        assert {key: rcParams[key] for key in theirs} == theirs
    draw_run(run, tmp_path / "ours.png")
    assert (tmp_path / "theirs.png").read_bytes() == (tmp_path / "ours.png").read_bytes()


def test_all_that_draws_a_file_draws_it_in_the_plain_style() -> None:
    modules = [import_module(f"{analysis.__name__}.{found.name}") for found in iter_modules(analysis.__path__)]
    public = [function for module in modules for name, function in vars(module).items() if name.startswith("draw_")]
    files = {draw_run, write_report, *(each for each in public if "path" in signature(each).parameters)}
    files = {each for each in files if each.__module__.startswith("lightning_sv")}  # conftest stands in for one
    assert len(files) >= 6 and [each for each in files if not hasattr(each, "__wrapped__")] == []


def test_settings_that_stop_matplotlib_stop_no_command(tmp_path: Path) -> None:
    (tmp_path / "rc").write_bytes(b"font.family: \xff\n")
    env = os.environ | {"MPLBACKEND": "none such", "MATPLOTLIBRC": str(tmp_path / "rc")}
    code = "import lightning_sv.cli.main as it; it.main = lambda: int(not __import__('matplotlib')); it.cli()"
    subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True)
