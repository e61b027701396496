"""Plots of panels: lines, legends and marks, and one colour for each baseline."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes

from lightning_sv.errors import NotTestableError
from lightning_sv.experiments.arms import Arm, paired_losses
from lightning_sv.experiments.kinds.base import KINDS, LoadedPanel
from lightning_sv.experiments.report.copying import copying_table
from lightning_sv.experiments.report.curve_plots import curve_plots
from lightning_sv.experiments.report.grid_plots import grid_plots
from lightning_sv.experiments.report.plot import with_looks
from lightning_sv.experiments.report.scalar_plots import branch_plots, scalar_plots
from lightning_sv.experiments.report.scaling_plots import gap_plot, scaling_plots
from lightning_sv.experiments.report.write import write_report
from lightning_sv.experiments.results import Figure
from lightning_sv.experiments.spec import FigureSpec, PanelSpec
from lightning_sv.plots.style import BLUE
from lightning_sv.runs.events import Curve, Run
from tests.experiments import fake_results as fake

MILLION = 1_000_000


def legend(axes: Axes) -> list[str]:
    return axes.get_legend_handles_labels()[1]


def bar_names(axes: Axes) -> list[str]:
    return [str(bar.get_label()).split("  ")[0] for bar in axes.containers]


def panel_of(arms: Sequence[Arm], **spec: Any) -> LoadedPanel:
    return LoadedPanel.of_arms(PanelSpec("p", **spec), arms)


def with_curve(run: Run, tag: str, curve: Curve) -> Run:
    return replace(run, curves={**run.curves, tag: curve})


def test_curve_plots_long_names_are_inside_the_picture() -> None:
    dp, llama, ours = fake.curves_panel().arms
    long_name = replace(ours, label="tiny-hg+dnp+or+iwd_lm_head_dp_-seed100-1b85a92304" * 2)
    plots, _ = curve_plots(panel_of([dp, llama, long_name]))
    for plot in plots:
        plot.figure.draw_without_rendering()
        (names,) = plot.figure.legends
        box = names.get_window_extent()
        assert box.x1 <= plot.figure.bbox.x1 and box.y0 >= 0
        assert plot.figure.axes[0].get_window_extent().height > 300


def test_curve_plots_legend_has_the_minus_of_the_axes() -> None:
    """A hyphen of a name stays."""
    dp, llama, _ = fake.curves_panel().arms
    plots, _ = curve_plots(panel_of([replace(dp, label="dp-1"), llama]))
    (name,) = plots[1].figure.legends[0].get_texts()
    assert name.get_text().startswith("dp-1") and "  −0." in name.get_text()


@pytest.mark.parametrize("base", ["llama", "nop", "gemma"])
def test_with_looks_baseline_is_blue_and_solid(base: str) -> None:
    """Whatever its name, also if llama is a different arm; the other arms are not."""
    more = map(str, range(6))  # as in the figure `protocol`
    names = dict.fromkeys(("llama", "unified", "nop", base, *more))
    (first, look), *others = with_looks([Arm(name, baseline=name == base) for name in names])
    assert first.label == base and look == (BLUE, "-")
    looks = [other for _, other in others]
    for colour, line in looks:
        assert colour != BLUE and line != "-"
    assert len(set(looks)) == len(looks)


def test_plots_of_equal_figures_have_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (plot,), _ = grid_plots(fake.grid_panel())
        plot.save(tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_curve_plots_unpaired_arms_are_named() -> None:
    panel = fake.curves_panel()
    runs = []
    for run in fake.arm("longer", 0.0).runs:
        curve = run.curve("val/loss")
        runs.append(with_curve(run, "val/loss", Curve(curve.tokens * 2, curve.values)))
    plots, notes = curve_plots(panel_of([*panel.arms, Arm("longer", dict(enumerate(runs)))]))
    drawn = ["longer" in " ".join(legend(plot.figure.axes[0])) for plot in plots]
    assert drawn == [True, False]
    (note,) = notes
    assert note.startswith("longer ends at 3.1M tokens, llama at 1.5M")
    without_baseline = [replace(arm, baseline=False) for arm in panel.arms]
    plots, _ = curve_plots(panel_of(without_baseline))
    assert [plot.name for plot in plots] == ["loss"]


@pytest.mark.parametrize("has_curves", [True, False])
def test_curve_plots_ends_are_those_of_the_table(has_curves: bool) -> None:
    """Also if the arms have different seeds, or recorded runs have their last point only."""
    panel = fake.curves_panel(3)
    dp, llama, ours = panel.arms
    curve = ours.runs[2].curve("val/loss")
    worse = with_curve(ours.runs[2], "val/loss", Curve(curve.tokens, curve.values + 0.03))
    arms = [dp.on((0, 1)), llama, replace(ours, by_seed={**ours.by_seed, 2: worse})]
    if not has_curves:
        arms = [replace(arm, by_seed=dict(enumerate(map(_last, arm.runs)))) for arm in arms]
    shown = LoadedPanel.of_arms(panel.spec, arms)
    plots, notes = curve_plots(shown)
    assert not notes
    losses, differences = (plot.figure.axes[0] for plot in plots)
    table = shown.kind.table(shown)
    assert legend(losses) == [f"{row[0]}  {row[1]}" for row in table.itertuples(index=False)]
    ends = [name.split("  ")[1].split(",")[0] for name in legend(differences)]
    assert ends == table.iloc[1:].difference.tolist()
    points = [bar.lines[0].get_ydata()[0] for bar in differences.containers]  # type: ignore[attr-defined]
    assert [f"{point:+.4f}" for point in points] == ends
    assert differences.get_ylim()[0] < 0 < differences.get_ylim()[1]
    if has_curves:
        assert losses.get_ylim()[1] < 4.5  # the first drop is cut


def _last(run: Run) -> Run:
    """Return a run with its final loss only."""
    tokens, values = run.curve("val/loss")
    return replace(run, curves={"val/loss": Curve(tokens[-1:], values[-1:])})


def test_scaling_table_has_the_slope_and_one_size_no_line() -> None:
    panel = fake.scaling_panel()
    series, line = panel.kind.lines(panel)[0]
    assert series.label == "unified"
    slopes = panel.kind.table(panel).filter(like="e-fold")
    assert slopes.iloc[0, 0].startswith(f"{line.slope.mean:+.4f} (")
    plots, _ = scaling_plots(fake.scaling_panel(sizes=fake.SIZES[:1]))
    assert [plot.name for plot in plots] == [
        "sizes",
        "loss-dense-200000",
        "difference-dense-200000",
    ]


def test_length_plots_have_a_difference_per_length() -> None:
    """A point and an interval per arm and length; the baseline is the zero line."""
    panel = fake.scaling_panel()
    lengths = [7, 27, 50, 100]
    arms = []
    for i, arm in enumerate(panel.arms):
        arms.append(replace(arm, point=(lengths[i % 4],)))
    panel = replace(panel, spec=replace(panel.spec, kind="lengths"), arms=tuple(arms))
    axes = gap_plot(panel).figure.axes[0]
    assert bar_names(axes) == ["unified", "hg+dp+or (ours)"]
    baseline, unified, _ = panel.series
    means = (unified.losses - baseline.losses).mean(axis=1)
    line, _, (intervals,) = axes.containers[0].lines  # type: ignore[attr-defined]
    assert line.get_ydata() == pytest.approx(means)
    assert list(line.get_xdata()) == pytest.approx(lengths)
    assert len(intervals.get_segments()) == 4
    assert len(panel.kind.table(panel)) == 12


@pytest.mark.parametrize("kind", ["lengths", "scaling"])
def test_models_panel_lost_run_leaves_out_no_run_of_other_arms(kind: str) -> None:
    """Losses have the seeds of the differences; a line has those of all sizes."""
    whole = fake.scaling_panel()
    lost = [arm.on([0, 1]) if arm.label == "unified, 200000" else arm for arm in whole.arms]
    arms = KINDS[kind].comparable(lost)
    assert list(arms) == lost
    panel = LoadedPanel.of_arms(replace(whole.spec, kind=kind), arms)
    counts = [pair.difference.n for pair in panel.pairs]
    assert counts == [2, 3, 3, 3, 3, 3, 3, 3]
    baseline, unified, _ = panel.series
    losses_of_baseline, losses = paired_losses(baseline, unified)
    assert losses_of_baseline.shape == losses.shape == (4, 2)
    assert gap_plot(panel).figure.legends[0].get_title().get_text() == (
        "95% interval of 2 to 3 pairs"
    )
    assert panel.kind.draw(panel).plots
    with pytest.raises(NotTestableError, match="llama and unified"):
        paired_losses(baseline, replace(unified, arms=(lost[4].on([]), *unified.arms[1:])))


def test_grid_plots_name_the_optimum() -> None:
    panel = fake.grid_panel()
    (plot,), notes = grid_plots(panel)
    llama, unified = legend(plot.figure.axes[0])
    assert llama.startswith("llama: 3.0") and llama.endswith("at 0.00294")  # noise moves it by 2%
    assert unified.startswith("unified: 3.0")
    assert "times or over 1.01" in notes[0]
    _, notes = grid_plots(replace(panel, arms=(*panel.arms[:2], *panel.arms[4:6])))
    assert "unified" in notes[0] and "end of the grid" in notes[0]


def test_branch_plots_have_one_scale() -> None:
    arms = [fake.arm("llama", 0.0, baseline=True), fake.arm("hg", 0.0), fake.point("nop", 3.0)]
    plots, notes = branch_plots(panel_of(arms, kind="qkv"))
    assert len(notes) == 1 and notes[0].startswith("nop")
    first, second = (plot.figure.axes[0] for plot in plots)
    assert first.get_ylim() == second.get_ylim()
    norms = arms[0].runs[0].curve("branch_norm/mean/v_proj/effective").values
    assert f"V, x {norms[-1] / norms[0]:.2f} at the end" in legend(first)


def test_scalar_plots_are_in_logarithms() -> None:
    """Legend and table have the geometric mean of the last values."""
    arms = []
    for label, times in (("hg", 2.0), ("llama", 1.0)):
        runs = []
        for seed, run in enumerate(fake.arm(label, 0.0).runs):
            values = times * np.array([1.0, 10.0, 100.0]) * 2.0 ** (seed - 1)
            runs.append(with_curve(run, "sharp", Curve(np.array([0, 1000, 10_000]), values)))
        arms.append(Arm(label, dict(enumerate(runs)), baseline=label == "llama"))
    nop = fake.point("nop", 3.0)
    panel = panel_of([*arms, nop], kind="scalar", tag="sharp")
    (plot,), notes = scalar_plots(panel)
    axes = plot.figure.axes[0]
    assert legend(axes) == ["llama  100 at the end", "hg  200 at the end"]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert panel.kind.table(panel).iloc[0].tolist() == ["llama", "100", "50, 100, 200"]
    assert len(notes) == 1 and notes[0].startswith("nop")
    assert scalar_plots(panel_of([nop], kind="scalar", tag="sharp")) == ((), notes)


def copying_run(run: Run, formed: int, unseen: float) -> Run:
    """Return a run whose circuit forms before the point of an index."""
    late = np.arange(5) >= formed
    scalars = {
        "second_minus_first": np.where(late, -1.0, 0.0),
        "repeat": np.where(late, 1.0, 3.0),
        "seen": np.full(5, 2.5),
        "unseen": np.full(5, unseen),
        "repeat_share": np.full(5, 0.3),
        "seen_share": np.full(5, 0.2),
    }
    for key, values in scalars.items():
        run = with_curve(run, f"copying/{key}", Curve(np.arange(1, 6) * MILLION, values))
    return run


def test_copying_table_has_parts_and_time_of_the_circuit(tmp_path: Path) -> None:
    """The circuit forms between two points in llama; it never forms in dp."""
    dp, llama, _ = fake.curves_panel().arms
    never = [copying_run(run, 5, 3.4) for run in dp.runs]
    fourth = [copying_run(run, 4, 3.5) for run in llama.runs]
    arms = [replace(dp, by_seed=dict(enumerate(never)))]
    arms.append(replace(llama, by_seed=dict(enumerate(fourth))))
    panel = panel_of(arms)
    table = copying_table(panel).set_index("arm")
    formed = table["circuit forms after, M tokens"]
    assert formed["llama"] == "4.50, 4.50, 4.50" and "never" in formed["dp"]
    parts = table.filter(like="difference by").loc["dp"].astype(float).tolist()
    assert parts == pytest.approx([0.3 * 2, 0, 0.5 * -0.1])
    write_report([Figure(FigureSpec("f", "t", "s", []), (panel,))], tmp_path, "w")
    assert (tmp_path / "figures/f-1-copying.png").is_file()
    estimates = {}
    for row in fake.rows(tmp_path / "differences.csv"):
        estimates[row["quantity"]] = float(row["estimate"])
    assert estimates["final loss, part of repeat"] == pytest.approx(0.6)


def test_write_report_arm_without_a_seed_of_the_baseline(tmp_path: Path) -> None:
    """As after divergences: llama has seeds 0 and 1, dp has 2, and the third arm has all."""
    arms = []
    for arm, seeds in zip(fake.curves_panel().arms, ([2], [0, 1], [0, 1, 2]), strict=True):
        by_seed = {seed: copying_run(arm.by_seed[seed], 4, 3.5) for seed in seeds}
        arms.append(replace(arm, by_seed=by_seed))
    write_report([Figure(FigureSpec("f", "t", "s", []), (panel_of(arms),))], tmp_path, "w")
    assert {row["arm"] for row in fake.rows(tmp_path / "differences.csv")} == {"hg+dp+or"}
    assert "dp - llama cannot be drawn" in (tmp_path / "report.md").read_text()
