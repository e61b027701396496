"""Looks: a panel that a few pairs decide gets no more, the rest of the time goes to those that are open."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from lightning_sv.analysis.paired import percent
from lightning_sv.analysis.sequential import levels
from lightning_sv.experiments.judge import judge
from lightning_sv.experiments.looks import first_look, train_by_looks
from lightning_sv.experiments.plan import plan_figure
from lightning_sv.experiments.recipes import Recipes
from lightning_sv.experiments.results import Figure
from lightning_sv.experiments.runs import Runs
from lightning_sv.experiments.sources.figures import load_budget, load_figure
from lightning_sv.experiments.spec import Budget
from tests.experiments.test_compare import FAKE
from tests.experiments.test_figures import conf

__all__ = ["conf"]  # a fixture

#: panel -> its baseline and the other arms: two pairs tell of hg, not of dp and ap; er and or scatter most
PANELS = {"clear": ("llama", "hg"), "open": ("llama", "dp", "ap"), "wide": ("dp+or", "dp+er")}
DELTAS = {
    "hg": " -0.500,-0.502,-0.500,-0.498",
    "dp": "0.003,-0.003,0.002,-0.003",
    "ap": "0.002,-0.002,-0.002,0.002",
    "dp+er": "0.3,-0.3,0.3,-0.3",
    "dp+or": "0.0,0.0,0.0,0.0",
}


def set_up(conf: Path, **budget: object) -> tuple[list[Figure], Budget]:
    panels = []
    for title, (base, *others) in PANELS.items():
        named = "".join(f"    {arm}: {{scale: {arm}}}\n" for arm in (base, *others))
        claims = "".join(f"  - {{kind: less, a: {arm}, b: {base}, paper: lower}}\n" for arm in others)
        panels.append(f"- title: {title}\n  arms:\n{named}  claims:\n{claims}")
    (conf / "paper/mine.yaml").write_text("title: t\nsection: s\nsummary: s\npanels:\n" + "".join(panels))
    found = replace(load_budget("cpu", conf), **{"seeds": 4, "looks": [2], **budget})  # type: ignore[arg-type]
    return [plan_figure(load_figure("mine", conf), Recipes(found, {}, conf))], found


def trained(runs: Runs) -> dict[str, int]:
    """Runs of every strategy that are complete."""
    found: dict[str, int] = {}
    for path in (runs.out / "runs").glob("*/summary.json"):
        label = re.sub(r"-seed.*", "", path.parent.name.removeprefix("tiny-"))
        found[label] = found.get(label, 0) + 1
    return found


def look(figures: list[Figure], budget: Budget, out: Path, *words: str, fails: bool = False) -> tuple[Runs, str]:
    launcher = (*FAKE, *(word for item in DELTAS.items() for word in ("--delta_of", *item)), *words)
    runs, said = Runs(out, launcher=launcher), Console(file=io.StringIO(), width=300)
    assert bool(train_by_looks(figures, runs, budget, parallel=2, console=said)) == fails
    return runs, said.file.getvalue()  # type: ignore[attr-defined]


def test_an_open_panel_gets_more_pairs(conf: Path, tmp_path: Path) -> None:
    """Each at the price of its look; what the first look decided is judged as it was, to the last digit."""
    figures, budget = set_up(conf)
    runs, said = look(figures, budget, tmp_path)
    assert trained(runs) == {"llama": 4, "hg": 2, "dp": 4, "ap": 4, "dp+er": 4, "dp+or": 4}
    assert "after 2 pairs 2 panels have open claims; 2 of them get 4 pairs" in said
    (figure,) = judge(figures, runs)
    early, late = (1 - 2 * level for level in levels([2, 4]))
    assert [v.confidence for v in figure.verdicts] == pytest.approx([early, late, late, late])
    assert [(v.verdict == "holds", v.n) for v in figure.verdicts] == [(True, 2), (False, 4), (False, 4), (False, 4)]
    assert f"{percent(early)} interval" in figure.verdicts[0].sentence
    assert [[len(arm.runs) for arm in panel.arms] for panel in figure.panels] == [[2, 2], [4] * 3, [4] * 2]
    assert not any(panel.left_out for panel in figure.panels) and not figure.warnings
    (before,) = judge(first_look(figures, budget), runs)
    assert {**vars(before.verdicts[0]), "p_corrected": 0} == {**vars(figure.verdicts[0]), "p_corrected": 0}
    p = figure.verdicts[0].p
    assert p is not None and p < 0.05 and figure.verdicts[0].corrected == "holds"
    _, again = look(figures, budget, tmp_path)
    assert "done in" not in again and sum(trained(runs).values()) == 22


def test_further_pairs_keep_to_the_time(conf: Path, tmp_path: Path) -> None:
    """The figure's first question is decided: the widest interval comes first, and what does not fit is left out."""
    figures, budget = set_up(conf)
    assert sum(len(figure.runs()) for figure in first_look(figures, budget)) == 12
    each = 13 * 3 / 60  # minutes of a run, as the budget's YAML has it
    runs, said = look(figures, replace(budget, core_minutes=each * 18.5), tmp_path / "some")
    assert trained(runs) == {"llama": 2, "hg": 2, "dp": 2, "ap": 2, "dp+er": 4, "dp+or": 4}
    assert "2 panels have open claims; 1 of them get 4 pairs" in said
    (figure,) = judge(figures, runs)
    assert [v.n for v in figure.verdicts] == [2, 2, 2, 4]
    runs, said = look(figures, replace(budget, core_minutes=each * 13), tmp_path / "none")
    assert set(trained(runs).values()) == {2} and "2 panels have open claims; 0 of them" in said


def test_a_run_that_fails_at_a_later_look_is_said(conf: Path, tmp_path: Path) -> None:
    figures, budget = set_up(conf)
    runs, _ = look(figures, budget, tmp_path, "--fail_seed", "3", fails=True)
    assert trained(runs) == {"llama": 3, "hg": 2, "dp": 3, "ap": 3, "dp+er": 3, "dp+or": 3}
    (figure,) = judge(figures, runs)
    clear, still, wide = figure.panels
    assert clear.left_out is None and (still.pairs, wide.pairs) == (4, 4)
    assert "3 of its runs did not finish" in str(still.left_out) and "2 of its runs" in str(wide.left_out)
    assert [v.n for v in figure.verdicts] == [2, 3, 3, 3]
    assert figure.verdicts[1].confidence == pytest.approx(1 - 2 * levels([2, 4])[1])


def test_without_looks_all_pairs_are_trained(conf: Path, tmp_path: Path) -> None:
    figures, budget = set_up(conf, looks=[])
    runs, said = look(figures, budget, tmp_path)
    assert set(trained(runs).values()) == {4} and "open claims" not in said
    assert [v.confidence for v in judge(figures, runs)[0].verdicts] == pytest.approx([0.9] * 4)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("looks: [2]", r"budget cpu: its looks \[2\] and its seeds 2 are no increasing numbers of pairs"),
        ("looks: [3]", r"budget cpu: its looks \[3\] and its seeds 2 are no increasing numbers of pairs"),
        ("looks: [1]", r"budget cpu: its looks \[1\] and its seeds 2 are no increasing numbers of pairs"),
        ("core_minutes: 9", "core_minutes bounds the pairs beyond the looks of a CPU's budget; this one has no looks"),
    ],
)
def test_looks_that_cannot_be_kept_are_refused(conf: Path, keys: str, message: str) -> None:
    path = conf / "paper/budgets/cpu.yaml"
    path.write_text(f"{path.read_text()}{keys}\n")  # of two seeds
    with pytest.raises(ValueError, match=message):
        load_budget("cpu", conf)
