"""Plots of panels: lines, legends and marks, and one colour for each baseline."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D

from lightning_sv.experiments.arms import Arm
from lightning_sv.experiments.kinds.base import LoadedPanel
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


def legend(axes: Axes) -> dict[str, tuple[str, str]]:
    """Return name -> colour and line style of the legend."""
    lines: list[Line2D]
    lines, names = axes.get_legend_handles_labels()
    return {
        n: (to_hex(x.get_color()).upper(), x.get_linestyle())
        for n, x in zip(names, lines, strict=True)
    }


@pytest.mark.parametrize("seeds", [1, 3])
def test_curve_plots_have_losses_and_differences(seeds: int) -> None:
    panel = fake.curves_panel(seeds)
    plots, notes = curve_plots(panel)
    loss, difference = (plot.figure.axes[0] for plot in plots)
    assert [plot.name for plot in plots] == ["loss", "difference"] and not notes
    dp, llama, ours = panel.arms
    ends = {
        arm.name: f"{arm.name}  {np.mean([run.val_loss for run in arm.runs]):.4f}"
        for arm in panel.arms
    }
    assert list(legend(loss)) == [ends[name] for name in ("llama", "dp", "hg+dp+or (ours)")]
    assert legend(loss)[ends["llama"]] == (BLUE, "-")
    assert len(set(legend(loss).values())) == 3
    gaps = [
        np.mean([b.val_loss - a.val_loss for a, b in zip(llama.runs, x.runs, strict=True)])
        for x in (dp, ours)
    ]
    words = list(legend(difference))
    assert words[0].startswith(f"dp  {gaps[0]:+.4f}") and words[1].startswith(
        f"hg+dp+or (ours)  {gaps[1]:+.4f}"
    )
    assert list(legend(difference).values()) == list(legend(loss).values())[1:]
    assert (
        loss.get_ylim()[1] < 4.5 and difference.get_ylim()[0] < 0 < difference.get_ylim()[1]
    )  # the first drop is cut
    assert ("one pair: no interval" in plots[1].figure.legends[0].get_title().get_text()) == (
        seeds == 1
    )


def test_with_looks_baseline_is_blue_and_solid(tmp_path: Path) -> None:
    """Blue and solid whatever its name, also if llama is a different arm; other arms are not."""
    for base in ("llama", "wd", "nop", "unified", "gemma"):
        labels = dict.fromkeys(("llama", "unified", "nop", base))
        (first, look), *others = with_looks(
            [Arm(label, baseline=label == base) for label in labels]
        )
        assert first.label == base and look == (BLUE, "-")
        looks = [other for _, other in others]
        assert all(colour != BLUE and line != "-" for colour, line in looks) and all(
            a != b for a, b in pairwise(looks)
        )
    for name in ("a", "b"):
        grid_plots(fake.grid_panel())[0][0].save(tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_curve_plots_unpaired_arms_are_named() -> None:
    panel = fake.curves_panel()
    longer = fake.arm("longer", 0.0)
    for run in longer.runs:
        curve = run.curves["val/loss"]
        run.curves["val/loss"] = Curve(curve.tokens * 2, curve.values)  # type: ignore[index]
    plots, notes = curve_plots(LoadedPanel.of_arms(PanelSpec("p"), (*panel.arms, longer)))
    assert [any("longer" in word for word in legend(plot.figure.axes[0])) for plot in plots] == [
        True,
        False,
    ]
    (note,) = notes
    assert note.startswith("longer ends at 3.1M tokens, llama at 1.5M: only the table has")
    alone = [Arm(arm.label, arm.runs, False, False) for arm in panel.arms]
    assert [
        plot.name for plot in curve_plots(LoadedPanel.of_arms(PanelSpec("p"), tuple(alone)))[0]
    ] == ["loss"]


def test_curve_plots_ends_are_those_of_the_table() -> None:
    """Also if the arms have different seeds, or recorded runs have their last point only."""
    panel = fake.curves_panel(3)
    dp, llama, ours = panel.arms
    curve = ours.runs[2].curves["val/loss"]
    ours.runs[2].curves["val/loss"] = Curve(curve.tokens, curve.values + 0.03)  # type: ignore[index]
    fewer = replace(dp, runs=dp.runs[:2])
    for alone in (False, True):
        arms = (
            replace(arm, runs=tuple(map(_last, arm.runs))) if alone else arm
            for arm in (fewer, llama, ours)
        )
        shown = LoadedPanel.of_arms(panel.spec, tuple(arms))
        plots, notes = curve_plots(shown)
        axes, table = plots[-1].figure.axes[0], shown.kind.table(shown).iloc[1:]
        names = axes.get_legend_handles_labels()[1]
        assert [name.split("  ")[1].split(",")[0] for name in names] == table.difference.tolist()
        assert any(note.startswith("dp: the line is the mean") for note in notes)
    bars: list[Any] = axes.containers
    assert [bar.has_yerr for bar in bars] == table["95% interval"].str[0].isin(["+", "-"]).tolist()


def _last(run: Run) -> Run:
    """Return a run with its final loss only."""
    return replace(
        run, curves={name: Curve(*(x[-1:] for x in curve)) for name, curve in run.curves.items()}
    )


@pytest.mark.long
def test_scaling_plots_have_both_fits_and_the_difference() -> None:
    panel = fake.scaling_panel()
    (fit, gap, *sizes), notes = scaling_plots(panel)
    axes = fit.figure.axes[0]
    law, _ = panel.fits[0]["unified"]
    assert law.a.formula() in legend(axes)
    assert {"llama", "unified", "hg+dp+or (ours)", "linear in ln N"} <= set(legend(axes))
    table = panel.kind.table(panel)
    assert not notes and table.arm.tolist() == ["unified"] * 2 + ["hg+dp+or (ours)"] * 2
    assert table[["law", "law of llama"]].iloc[0].tolist() == [law.b.formula(), law.a.formula()]
    assert table.filter(like="slope").iloc[0, 0].startswith(f"{law.slope.mean:+.4f} (")
    bars = gap.figure.axes[0].containers
    assert [str(bar.get_label()).split("  ")[0] for bar in bars] == ["unified", "hg+dp+or (ours)"]
    assert [plot.name for plot in sizes] == [
        f"{x}-{size}" for size in panel.sizes for x in ("loss", "difference")
    ]
    one_size, notes = scaling_plots(fake.scaling_panel(sizes=fake.SIZES[:1]))
    assert [plot.name for plot in one_size] == [
        "fit",
        "loss-dense-200000",
        "difference-dense-200000",
    ]
    assert "at least two sizes" in notes[0]


def test_length_plots_have_a_difference_per_length() -> None:
    """A point and an interval per arm and length, with the means of the pairs; the baseline is the
    zero line."""
    panel, lengths = fake.scaling_panel(), (7, 27, 50, 100)
    arms = tuple(replace(arm, point=(lengths[i % 4],)) for i, arm in enumerate(panel.arms))
    panel = replace(panel, spec=replace(panel.spec, kind="lengths"), arms=arms)
    plot = gap_plot(panel, {})
    axes = plot.figure.axes[0]
    bars: list[Any] = axes.containers
    assert [str(bar.get_label()).split("  ")[0] for bar in bars] == ["unified", "hg+dp+or (ours)"]
    base, unified, _ = panel.series
    means = [
        float((b.losses - a.losses).mean()) for a, b in zip(base.arms, unified.arms, strict=True)
    ]
    assert (
        bars[0].lines[0].get_ydata() == pytest.approx(means)
        and len(bars[0].lines[2][0].get_segments()) == 4
    )
    assert (
        list(bars[0].lines[0].get_xdata()) == pytest.approx(lengths) and axes.get_xscale() == "log"
    )
    assert str(bars[0].get_label()).endswith(f"{means[-1]:+.3f} at 100")
    assert len(panel.kind.table(panel)) == 12


def test_grid_plots_name_the_optimum() -> None:
    panel = fake.grid_panel()
    (plot,), notes = grid_plots(panel)
    axes = plot.figure.axes[0]
    names = list(legend(axes))
    assert names[0].startswith("llama: 3.0") and names[0].endswith(
        "at 0.00294"
    )  # the noise moves it by 2%
    assert names[1].startswith("unified: 3.0") and not notes and plot.name == "lr"
    _, notes = grid_plots(replace(panel, arms=(*panel.arms[:2], *panel.arms[4:6])))
    assert (
        notes[0]
        == "unified has no fitted optimum: the lowest loss is at the end of the grid (0.003)."
    )


def test_branch_plots_have_one_scale() -> None:
    bare = fake.point("nop", 3.0)
    arms = (fake.arm("llama", 0.0, baseline=True), fake.arm("hg", 0.0, ours=True), bare)
    panel = LoadedPanel.of_arms(PanelSpec("b", kind="qkv"), arms)
    plots, notes = branch_plots(panel)
    assert len(plots) == 2 and notes == ["nop has no branch norms in its event files."]
    first, second = (plot.figure.axes[0] for plot in plots)
    assert first.get_ylim() == second.get_ylim() and second.get_title(loc="left").startswith(
        "hg (ours)"
    )
    run = panel.arms[0].runs[0].curve("branch_norm/mean/v_proj/effective").values
    assert f"V, x {run[-1] / run[0]:.2f} at the end" in legend(first)


def test_scalar_plots_are_in_logarithms() -> None:
    """Legend and table have the geometric mean of the last values."""
    arms = []
    for label, times in (("hg", 2.0), ("llama", 1.0)):
        whole = fake.arm(label, 0.0, baseline=label == "llama")
        for seed, run in enumerate(whole.runs):
            values = times * np.array([1.0, 10.0, 100.0]) * 2.0 ** (seed - 1)
            run.curves["sharp"] = Curve(np.array([0, 1000, 10_000]), values)  # type: ignore[index]
        arms.append(whole)
    panel = LoadedPanel.of_arms(
        PanelSpec("s", kind="scalar", tag="sharp"), (*arms, fake.point("nop", 3.0))
    )
    (plot,), notes = scalar_plots(panel)
    axes = plot.figure.axes[0]
    assert list(legend(axes)) == ["llama  100 at the end", "hg  200 at the end"]
    assert notes == ["nop has no sharp in its event files."]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    table = panel.kind.table(panel)
    assert table.columns[1].startswith("sharp") and table.iloc[0].tolist() == [
        "llama",
        "100",
        "50, 100, 200",
    ]
    empty = LoadedPanel.of_arms(panel.spec, panel.arms[2:])
    assert scalar_plots(empty) == ((), ["nop has no sharp in its event files."])


def test_copying_table_has_parts_and_time_of_the_circuit(tmp_path: Path) -> None:
    """The circuit forms between two points, of index 3 and 4 in llama; it never forms in dp."""
    panel = fake.curves_panel()
    for arm, formed in zip(panel.arms, (5, 4, 2), strict=True):
        for k, run in enumerate(arm.runs):
            late = np.arange(5) >= formed
            curves = {
                "second_minus_first": np.where(late, -1.0, 0.0),
                "repeat": np.where(late, 1.0, 3.0) + 0.01 * k,
            }
            curves |= {"seen": np.full(5, 2.5), "unseen": np.full(5, 3.5 if arm.baseline else 3.4)}
            curves |= {"repeat_share": np.full(5, 0.3), "seen_share": np.full(5, 0.2)}
            for key, values in curves.items():
                run.curves[f"copying/{key}"] = Curve(np.arange(1, 6) * 1_000_000, values)  # type: ignore[index]
    table = copying_table(panel).set_index("arm")
    formed = table["circuit forms after, M tokens"]
    assert formed["llama"] == "4.50, 4.50, 4.50" and set(formed["dp"].split(", ")) == {"never"}
    parts = table.filter(like="difference by").loc["dp"].astype(float).tolist()
    assert parts == pytest.approx([0.3 * 2, 0, 0.5 * -0.1])
    write_report([Figure(FigureSpec("f", "t", "s", "s", []), (panel,))], tmp_path, "w")
    assert (tmp_path / "figures/f-1-copying.png").is_file()
    found = {
        (row["arm"], row["quantity"]): float(row["estimate"])
        for row in fake.rows(tmp_path / "differences.csv")
    }
    assert found["dp", "final loss, part of repeat"] == pytest.approx(0.6)
