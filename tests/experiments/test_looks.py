"""Looks: who is decided by a few pairs gets no more, the rest of the time goes to the widest open interval."""

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
from tests.experiments.test_figures import FIGURE, conf

__all__ = ["conf"]  # a fixture

ARMS = "    llama: {scale: llama, baseline: true}\n    hg: {scale: hg}\n    dp: {scale: dp}\n    ap: {scale: ap}\n"
CLAIMS = "  claims:\n" + "".join(f"  - {{kind: less, a: {a}, b: llama, paper: lower}}\n" for a in ("hg", "dp", "ap"))
#: hg is far below llama; nobody can tell of dp and ap, ap scatters as llama does
DELTAS = {"hg": " -0.50,-0.51,-0.50,-0.49", "dp": "0.03,-0.03,0.02,-0.03", "ap": "0.02,-0.02,-0.02,0.02"}


def set_up(conf: Path, **budget: object) -> tuple[list[Figure], Budget]:
    (conf / "paper/mine.yaml").write_text(FIGURE[: FIGURE.index("    a:")] + ARMS + CLAIMS)
    found = replace(load_budget("cpu", conf), **{"seeds": 4, "looks": [2], **budget})  # type: ignore[arg-type]
    return [plan_figure(load_figure("mine", conf), Recipes(found, {}, conf))], found


def trained(runs: Runs) -> dict[str, int]:
    found: dict[str, int] = {}
    for path in (runs.out / "runs").iterdir():
        label = re.sub(r"-seed.*", "", path.name.removeprefix("tiny-"))
        found[label] = found.get(label, 0) + 1
    return found


def look(figures: list[Figure], budget: Budget, out: Path) -> tuple[Runs, str]:
    launcher = (*FAKE, *(word for item in DELTAS.items() for word in ("--delta_of", *item)))
    runs, said = Runs(out, launcher=launcher), Console(file=io.StringIO(), width=300)
    assert not train_by_looks(figures, runs, budget, parallel=2, console=said)
    return runs, said.file.getvalue()  # type: ignore[attr-defined]


def test_the_undecided_get_more_pairs(conf: Path, tmp_path: Path) -> None:
    """Two pairs decide hg at the price of an early look; dp, ap and the baseline go on to four, at the last one's."""
    figures, budget = set_up(conf)
    runs, said = look(figures, budget, tmp_path / "all")
    assert trained(runs) == {"llama": 4, "hg": 2, "dp": 4, "ap": 4}
    assert "after 2 pairs 2 claims are not decided; 2 of them, the widest intervals first, get 4 pairs" in said
    (figure,) = judge(figures, runs)
    early, late = (1 - 2 * level for level in levels([2, 4]))
    assert [v.confidence for v in figure.verdicts] == pytest.approx([early, late, late])
    assert [(v.verdict, v.n) for v in figure.verdicts] == [("holds", 2), ("not resolved", 4), ("not resolved", 4)]
    assert f"{percent(early)} interval" in figure.verdicts[0].sentence
    # the arms of the picture are on the pairs that all have; what is drawn and what is missing follow
    (panel,) = figure.panels
    assert {len(arm.runs) for arm in panel.arms} == {2} and panel.left_out is None and not figure.warnings
    _, again = look(figures, budget, tmp_path / "all")
    assert "done in" not in again and trained(runs) == {"llama": 4, "hg": 2, "dp": 4, "ap": 4}


def test_further_pairs_keep_to_the_time(conf: Path, tmp_path: Path) -> None:
    """Room for two arms of two pairs more: one claim, that with the widest interval; without room none."""
    figures, budget = set_up(conf)
    first = sum(len(figure.runs()) for figure in first_look(figures, budget))
    assert first == 8
    each = 13 * 3 / 60  # minutes of a run, as the budget's YAML has it
    runs, said = look(figures, replace(budget, core_minutes=each * 12.5), tmp_path / "some")
    assert sorted(trained(runs).values()) == [2, 2, 4, 4] and trained(runs)["llama"] == 4
    assert "2 claims are not decided; 1 of them" in said
    runs, said = look(figures, replace(budget, core_minutes=each * 9), tmp_path / "none")
    assert set(trained(runs).values()) == {2} and "2 claims are not decided; 0 of them" in said


def test_without_looks_all_pairs_are_trained(conf: Path, tmp_path: Path) -> None:
    figures, budget = set_up(conf, looks=[])
    runs, said = look(figures, budget, tmp_path / "plain")
    assert set(trained(runs).values()) == {4} and "claims are not decided" not in said
    assert [v.confidence for v in judge(figures, runs)[0].verdicts] == pytest.approx([0.9] * 3)


@pytest.mark.parametrize("looks", ["[2]", "[3]", "[1]"])
def test_looks_that_the_pairs_do_not_reach_are_refused(conf: Path, looks: str) -> None:
    path = conf / "paper/budgets/cpu.yaml"
    path.write_text(path.read_text() + f"looks: {looks}\n")  # of two seeds
    with pytest.raises(ValueError, match=r"budget cpu: its looks \[\d\] and its seeds 2 are no increasing numbers"):
        load_budget("cpu", conf)
