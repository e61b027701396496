"""Figures: files, sizes, titles, one colour for the baseline."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib import rcParams

from lightning_sv.errors import NotTestableError
from lightning_sv.plots import style
from lightning_sv.plots.run_plot import draw_run
from lightning_sv.plots.style import write_picture
from lightning_sv.runs.events import Curve, Run


def synthetic(label: str, seed: int, gain: float, branches: bool = True) -> Run:
    """Return a realistic run: power-law losses with noise, growing Q and K, shrinking V."""
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


def test_draw_run_dollar_in_a_label_is_a_dollar_sign(tmp_path: Path) -> None:
    draw_run(synthetic("price $5$", 0, 0.0), tmp_path / "r.png")
    assert (tmp_path / "r.png").stat().st_size > 10_000


@pytest.mark.parametrize(("tokens", "words"), [
    (0, "0"),
    (994, "994"),
    (995, "1k"),
    (1_536_000, "1.5M"),
    (2e10, "20B"),
])  # fmt: skip
def test_human_tokens_have_two_digits_and_a_unit(tokens: float, words: str) -> None:
    assert style.human_tokens(tokens) == words


@pytest.mark.parametrize("panels", [1, 2])
def test_set_style_long_title_is_not_cut(tmp_path: Path, panels: int) -> None:
    name = "hg+dnp+or+iwd[lm_head=dp]"
    figure = style.new_figure(panels)
    for axes in figure.subplots(1, panels, squeeze=False)[0]:
        axes.plot([0, 1], [-0.00001, 0.00002])
        title = f"How far from {name}? {name} ends 0.0123 lower\nand more"
        axes.set(title=title, ylabel=f"{name} - {name}, nats")
        style.set_style(axes)
    write_picture(figure, tmp_path / "a.png")
    for i, axes in enumerate(figure.axes):
        title = axes._left_title  # type: ignore[attr-defined]
        words = " ".join(title.get_text().split())
        assert words == f"How far from {name}? {name} ends 0.0123 lower and more"
        extent = title.get_window_extent()
        assert extent.x1 <= figure.bbox.width * (i + 1) / panels
        assert extent.y1 <= figure.bbox.height
        label = axes.yaxis.label.get_window_extent()
        assert label.y0 >= 0 and label.y1 <= figure.bbox.height


def test_draw_run_with_and_without_branch_norms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = []
    monkeypatch.setattr(
        style, "write_picture", lambda f, path: (figures.append(f), write_picture(f, path))
    )
    run = synthetic("llama", 0, 0.0)
    run.curve("train/loss").values[7] = np.nan
    draw_run(run, tmp_path / "two.png")
    grown = 8.8 / run.curve("branch_norm/mean/q_proj/effective").values[0]
    assert f"Q, x {grown:.2f} at the end" in figures[0].axes[1].get_legend_handles_labels()[1]
    losses, smooth = (line.get_ydata() for line in figures[0].axes[0].lines[:2])
    assert np.isfinite(smooth).all() and smooth[1500] == pytest.approx(losses[1470:1530].mean())
    assert "at 1.5M tokens" in " ".join(figures[0].axes[0].get_title(loc="left").split())
    draw_run(synthetic("llama", 0, 0.0, branches=False), tmp_path / "one.png")
    assert len(figures[1].axes) == 1
    with pytest.raises(NotTestableError):
        draw_run(Run(Path("x"), "llama", {}, {}, {}), tmp_path / "none.png")


def test_draw_run_settings_of_the_user_change_nothing(tmp_path: Path) -> None:
    run = synthetic("llama", 0, 0.0, branches=False)
    with pytest.MonkeyPatch.context() as patch:
        theirs = {"text.usetex": True, "font.size": 40.0, "savefig.dpi": 20, "axes.grid": True}
        for key, value in theirs.items():
            patch.setitem(rcParams, key, value)
        draw_run(run, tmp_path / "theirs.png")
        assert {key: rcParams[key] for key in theirs} == theirs
    draw_run(run, tmp_path / "ours.png")
    assert (tmp_path / "theirs.png").read_bytes() == (tmp_path / "ours.png").read_bytes()


def test_cli_damaged_matplotlibrc_does_not_stop_commands(tmp_path: Path) -> None:
    (tmp_path / "rc").write_bytes(b"font.family: \xff\n")
    env = os.environ | {"MPLBACKEND": "none such", "MATPLOTLIBRC": str(tmp_path / "rc")}
    code = (
        "import lightning_sv.cli.main as it; it.main = lambda: int(not __import__('matplotlib'));"
        " it.cli()"
    )
    subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True)
