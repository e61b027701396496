"""Figures: written, the right size, honest titles, one colour for the baseline."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from lightning_sv.paper import draw, draw_arms, figure
from lightning_sv.paper.events import Curve, Run


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


@pytest.mark.parametrize(
    ("tokens", "words"),
    [(0, "0"), (512, "512"), (1_536_000, "1.5M"), (999_999, "1M"), (25_000, "25k"), (2e10, "20B")],
)
def test_human_tokens(tokens: float, words: str) -> None:
    """Token counts as a reader says them."""
    assert figure.human_tokens(tokens) == words


def test_the_baseline_keeps_its_colour() -> None:
    """`llama` is blue on either side, and two arms never share a colour."""
    labels = ["llama", "unified", "nop", "hg+or", "dp", "llama lr=6e-3"]
    for other in labels[1:]:
        assert figure.colours(["llama", other])[0] == figure.BLUE == figure.colours([other, "llama"])[1]
    for a in labels:
        for b in labels:
            assert a == b or len(set(figure.colours([a, b]))) == 2
    four = figure.colours(["wd", "iwd", "owd", "nowd"])
    assert four[0] == figure.BLUE and len(set(four)) == 4  # blue is the baseline's where no llama is


@pytest.mark.parametrize(
    ("seeds", "gain", "answer"),
    [
        (3, -0.1, "unified ends 0.0"),
        (3, 0.0, "Not resolved"),
        (1, -0.1, "one pair: no interval"),
    ],
)
def test_comparison_says_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seeds: int, gain: float, answer: str
) -> None:
    """The title states the end of the drawn band, the early drop is cropped, ticks read 0.5M."""
    figures = []
    save = draw_arms.save
    monkeypatch.setattr(draw_arms, "save", lambda f, path: (figures.append(f), save(f, path)))
    runs_a = [synthetic("llama", k, 0.0) for k in range(seeds)]
    runs_b = [synthetic("unified", 10 + k, gain) for k in range(seeds)]
    for k, run in enumerate(runs_b):  # pairs share the seed's offset
        run.curve("val/loss").values[:] -= 0.01 * (10 + k) - 0.01 * k
    draw_arms.draw_comparison([runs_a, runs_b], tmp_path / "deep" / "c.png")
    assert imread(tmp_path / "deep" / "c.png").shape[:2] == (600, 1500)
    left, right = figures[0].axes
    words = right.get_title(loc="left") + " " + " ".join(text.get_text() for text in right.texts)
    assert answer in words
    assert left.get_ylim()[1] < 4.5 and right.get_ylim()[0] < 0 < right.get_ylim()[1]
    assert "0.5M" in [tick.get_text() for tick in left.get_xticklabels()]
    with pytest.raises(ValueError, match="one run per seed"):
        draw_arms.draw_comparison([runs_a, []], tmp_path / "c.png")


def test_a_run_with_and_without_branch_norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two panels with branch norms, whose title gives their growth; one panel without."""
    figures = []
    save = draw.save
    monkeypatch.setattr(draw, "save", lambda f, path: (figures.append(f), save(f, path)))
    run = synthetic("llama", 0, 0.0)
    draw.draw_run(run, tmp_path / "two.png")
    grown = 8.8 / run.curve("branch_norm/mean/q_proj/effective").values[0]
    assert f"Q, x {grown:.2f} at the end" in figures[0].axes[1].get_legend_handles_labels()[1]
    assert "at 1.5M tokens" in figures[0].axes[0].get_title(loc="left")
    draw.draw_run(synthetic("llama", 0, 0.0, branches=False), tmp_path / "one.png")
    assert len(figures[1].axes) == 1
    with pytest.raises(ValueError, match="no loss yet"):
        draw.draw_run(Run(Path("x"), "llama", {}, {}, {}), tmp_path / "none.png")


def test_running_mean_is_centred_and_skips_what_diverged() -> None:
    """Against numpy's convolution inside; a NaN does not spread."""
    values = np.random.default_rng(0).normal(size=20)
    inside = np.convolve(values, np.ones(5) / 5, mode="valid")
    assert draw._running_mean(values, 5)[2:-2] == pytest.approx(inside)
    assert draw._running_mean(values, 1) == pytest.approx(values)
    values[7] = np.nan
    assert np.isfinite(draw._running_mean(values, 5)).all()
