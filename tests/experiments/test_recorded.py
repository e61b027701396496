"""Recordings instead of runs, and the recorded claims of `make theory`."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lightning_sv.errors import ConfigError
from lightning_sv.experiments.arms import Arm
from lightning_sv.experiments.kinds.base import KINDS, LoadedPanel
from lightning_sv.experiments.plan import plan_figure
from lightning_sv.experiments.preflight import check_recorded
from lightning_sv.experiments.report.differences import difference_frame
from lightning_sv.experiments.report.results_csv import (
    CLIPPED,
    clipped_share,
    read_recorded,
    run_frame,
    write_csv,
)
from lightning_sv.experiments.report.write import write_report
from lightning_sv.experiments.resolver import RunResolver
from lightning_sv.experiments.results import Figure
from lightning_sv.experiments.run_store import RunStore
from lightning_sv.experiments.spec import (
    FigureSpec,
    PanelSpec,
    budget_names,
    load_budget,
    load_figure,
)
from lightning_sv.runs.events import Curve, Run
from lightning_sv.theory.claims import CLAIMS
from tests.conftest import ROOT, thinned
from tests.experiments.test_compare import FAKE
from tests.experiments.test_evaluate import judged, plan, train_all, trained


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Figure]:
    """Return the folder of a report of `heterogeneity`, and the evaluated figure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        figure, runs = trained(tmp_path_factory.mktemp("there"))
        found = judged(figure, runs)
        write_report([found], runs.out / "report", "cpu")
    return runs.out / "report", found


def curves_of(figure: Figure) -> list[list[float]]:
    (panel,) = figure.panels
    curves: list[list[float]] = []
    for arm in panel.arms:
        for curve in arm.curves:
            curves += [curve.tokens.tolist(), curve.values.tolist()]
    return curves


def test_recorded_runs_have_the_same_verdicts(
    recording: tuple[Path, Figure], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report, before = recording
    (figure,) = plan("heterogeneity")
    here = RunStore(tmp_path / "here", None, FAKE, recorded=read_recorded([report]))
    assert here.missing(figure.requests()) == [] and len(here.recorded) == 9
    assert read_recorded([report / "results.csv"]).keys() == here.recorded.keys()
    found = judged(figure, here)
    assert list(map(asdict, found.verdicts)) == list(map(asdict, before.verdicts))
    assert found.warnings == before.warnings == ()
    assert curves_of(found) == curves_of(before)
    write_report([found], here.out / "report", "cpu")
    recorded = (report / "results.csv").read_text()
    assert (here.out / "report/results.csv").read_text() == recorded  # in any folder

    assert not caplog.records
    changed = recorded.replace("10000:3", "10000:9").replace(",3.", ",9.")
    (tmp_path / "other.csv").write_text(changed)
    first = next(iter(here.recorded))
    both = read_recorded([report, tmp_path / "other.csv"])
    assert both[first].val_loss == here.recorded[first].val_loss and first in caplog.text


def recorded_figures() -> Iterator[tuple[str, str]]:
    """Yield folder and figure of each recording that can be evaluated again."""
    for folder in sorted(path.parent for path in ROOT.glob("results/*/results.csv")):
        if folder.name == "cpu-long-one-setting":  # its runs have names of an earlier configuration
            continue
        verdicts = table_of(folder / "verdicts.csv")
        differences = table_of(folder / "differences.csv")
        for figure in dict.fromkeys([*verdicts["figure"], *differences["figure"]]):
            yield folder.name, figure


def table_of(path: Path) -> pd.DataFrame:
    """Return a table of a recording; without rows if it has none."""
    if not path.exists() or not path.read_text().strip():
        return pd.DataFrame(columns=["figure"])
    return pd.read_csv(path)


#: a figure without claims, and claims on losses, curves and norms; older recordings divide one initial std among panels
FEW = [
    ("cpu-100-copying", "copying"),
    ("cpu-100-protocol", "protocol"),
    ("cpu-english", "english"),
    ("cpu-curves", "qkv-dynamics"),
    ("cpu-curves", "sharpness"),
    ("cpu-curves", "wsd"),
    ("gpu-25", "protocol"),
]


@pytest.mark.filterwarnings("ignore:scale strategy .* is the same model")
@pytest.mark.parametrize(("folder", "name"), thinned(recorded_figures(), FEW, several=True))
def test_figure_is_judged_as_recorded(folder: str, name: str, tmp_path: Path) -> None:
    budgets = [budget for budget in budget_names() if folder.startswith(budget)]
    resolver = RunResolver(load_budget(max(budgets, key=len)), {})
    figure = plan_figure(load_figure(name), resolver)
    recorded = read_recorded([ROOT / "results" / folder])
    found = judged(figure, RunStore(tmp_path, None, FAKE, recorded=recorded))

    facts = ["claim", "verdict", "paper", "n", "primary"]
    numbers = ["estimate", "low", "high", "p", "own_low", "own_high"]
    verdicts = pd.DataFrame(list(map(asdict, found.verdicts)), columns=[*facts, *numbers])
    expected = table_of(ROOT / "results" / folder / "verdicts.csv").query("figure == @name")
    expected = expected.reindex(columns=verdicts.columns)  # older recordings lack some of them
    assert verdicts[facts].to_numpy().tolist() == expected[facts].to_numpy().tolist()
    assert_numbers_equal(verdicts[numbers], expected[numbers])

    # older recordings divide one initial std among panels, which are one today
    place = ["figure", "panel", "arm", "baseline", "quantity"]
    numbers = ["estimate", "low", "high"]
    recorded_differences = table_of(ROOT / "results" / folder / "differences.csv")
    recorded_differences = recorded_differences.reindex(columns=[*place, *numbers]).astype(object)
    differences = difference_frame([found]).reindex(columns=[*place, *numbers]).astype(object)
    both = differences.merge(recorded_differences, on=place, suffixes=("", "_recorded"))
    assert differences.empty or not both.empty
    recorded_numbers = both[[f"{number}_recorded" for number in numbers]]
    assert_numbers_equal(both[numbers], recorded_numbers.set_axis(numbers, axis="columns"))


def assert_numbers_equal(numbers: pd.DataFrame, recorded: pd.DataFrame) -> None:
    """Compare the columns that are recorded."""
    are_recorded = recorded.notna().any()
    np.testing.assert_allclose(
        numbers.loc[:, are_recorded].astype(float),
        recorded.loc[:, are_recorded].astype(float),
        rtol=1e-6,
        atol=1e-12,
    )


NORM = "branch_norm/mean/q_proj/effective"


def claimed_scalar(val_loss: float, *specs: PanelSpec) -> Figure:
    """Return panels of one run with two scalars; the mean of CLIPPED is a column of each panel."""
    curves = {
        "val/loss": Curve(np.array([1_000, 2_000]), np.array([4.0, val_loss])),
        CLIPPED: Curve(np.array([1_000, 2_000]), np.array([0.5, 0.25])),
        NORM: Curve(np.array([1_000, 2_000]), np.array([1.0, 2.0])),
    }
    summary = {"seed": 0, "corpus_hash": "c0ffee", "tokenizer_sha256": "7001"}
    arm = Arm("llama", {0: Run(Path("llama-seed0"), "llama", {}, summary, curves)})
    panels = tuple(LoadedPanel.of_arms(spec, [arm]) for spec in specs)
    return Figure(FigureSpec("f", "t", "s", list(specs)), panels)


LOSSES = PanelSpec("Losses")
SCALAR = PanelSpec("Clipped", kind="scalar", tag=CLIPPED)
NORMS = PanelSpec("Norms", kind="scalar", tag=NORM)


@pytest.mark.parametrize("kind", KINDS)
def test_read_recorded_has_the_scalars_of_a_kind(kind: str, tmp_path: Path) -> None:
    figure = claimed_scalar(3.0, PanelSpec("Own", kind=kind))
    (arm,) = figure.panels[0].arms
    scalars = {tag: arm.runs[0].curve(NORM) for tag in KINDS[kind].scalars}
    arm.runs[0].curves.update(scalars)  # type: ignore[attr-defined]
    write_csv(tmp_path / "results.csv", run_frame([figure], tmp_path))
    (run,) = read_recorded([tmp_path]).values()
    assert scalars.keys() <= run.curves.keys()


@pytest.mark.parametrize(("recordings", "tag", "values"), [
    ([claimed_scalar(3.0, LOSSES, SCALAR)], CLIPPED, [0.5, 0.25]),
    ([claimed_scalar(3.0, SCALAR, LOSSES)], CLIPPED, [0.5, 0.25]),
    ([claimed_scalar(3.0, LOSSES), claimed_scalar(3.0, NORMS)], NORM, [1.0, 2.0]),
    ([claimed_scalar(3.0, LOSSES), claimed_scalar(3.5, NORMS)], NORM, None),
])  # fmt: skip
def test_read_recorded_run_has_the_scalars_of_its_panels(
    recordings: Sequence[Figure], tag: str, values: list[float] | None, tmp_path: Path
) -> None:
    """A recording of the same configuration on a different machine is a different run."""
    paths = [tmp_path / f"{number}.csv" for number in range(len(recordings))]
    for path, figure in zip(paths, recordings, strict=True):
        write_csv(path, run_frame([figure], tmp_path))
    (run,) = read_recorded(paths).values()
    assert (run.val_loss, clipped_share(run)) == (3.0, 0.375)
    found = run.curves.get(tag)
    assert (found and found.values.tolist()) == values


def test_train_runs_missing_in_a_recording(recording: tuple[Path, Figure], tmp_path: Path) -> None:
    """An existing run has priority over its row."""
    report, _ = recording
    table = pd.read_csv(report / "results.csv", dtype=str)
    is_lost = table["run"].str.contains("-hg-seed[01]")
    table[~is_lost].to_csv(tmp_path / "results.csv", index=False)
    (figure,) = plan("heterogeneity")
    launcher = (*FAKE, "--delta", "1")
    here = RunStore(tmp_path / "here", {}, launcher, read_recorded([tmp_path]))
    _, printed = train_all([figure], here)
    assert "7 of 9 runs are complete, 7 of them as recorded" in printed
    assert len(list((here.out / "runs").iterdir())) == 2
    found = judged(figure, here)
    (verdict,) = found.verdicts
    assert verdict.n == 3 and found.warnings == ()
    assert verdict.estimate > 0.5  # this launcher adds 1 to its losses
    again = judged(figure, replace(here, recorded=read_recorded([report])))
    assert again.verdicts[0].estimate == verdict.estimate


def test_read_recorded_row_without_curve_has_the_final_loss(
    recording: tuple[Path, Figure], tmp_path: Path
) -> None:
    """As in older recordings."""
    report, before = recording
    table = pd.read_csv(report / "results.csv", dtype=str)
    table.assign(curve="").to_csv(tmp_path / "results.csv", index=False)
    (figure,) = plan("heterogeneity")
    found = judged(figure, RunStore(tmp_path, None, FAKE, recorded=read_recorded([tmp_path])))
    assert found.verdicts[0].estimate == before.verdicts[0].estimate
    assert len(found.panels[0].arms[0].curves[0].tokens) == 1
    write_report([found], tmp_path / "report", "cpu")  # it is still drawn


def test_check_recorded_recording_of_another_figure_refused(
    recording: tuple[Path, Figure],
) -> None:
    report, _ = recording
    recorded = read_recorded([report])
    own, other = plan("heterogeneity", "muon")
    check_recorded([own, other], recorded, [report])
    with pytest.raises(ConfigError, match="results_from.*muon"):
        check_recorded([other], recorded, [report])
    with pytest.raises(ConfigError, match="results_from.*heterogeneity"):
        check_recorded([own], {}, [report])  # an empty file
    check_recorded([own], {}, [])


def with_last_line_cut_off(text: str) -> str:
    """Its run would count with the final loss alone, as in older recordings."""
    header, first, second, *_ = text.splitlines()
    return "\n".join([header, first, "", second.rpartition(",")[0]])


DAMAGES: dict[str, tuple[Callable[[str], str], str]] = {
    "a different corpus": (lambda text: text.replace("c0ffee", "decaf"), "corpus.*decaf"),
    "no numbers": (lambda text: text.replace("10000:", "many:"), "results.csv, line 2"),
    "cut off": (with_last_line_cut_off, "results.csv, line 4"),
    "an unmatched quote": (lambda text: f'{text}"', "results.csv is damaged after line 10"),
    "another table": (lambda text: text.replace("seed", "dees", 1), "results.csv, line 2"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_read_recorded_damaged_file_is_refused(
    name: str, recording: tuple[Path, Figure], tmp_path: Path
) -> None:
    damage, message = DAMAGES[name]
    text = (recording[0] / "results.csv").read_text()
    (tmp_path / "results.csv").write_text(damage(text))
    with pytest.raises(ConfigError, match=message):
        read_recorded([tmp_path], "c0ffee")


RECORDED = ROOT / "results/theory/theory.json"


def test_recorded_claims_are_the_current_ones() -> None:
    """A new or changed claim needs a new `make theory`."""
    rows = json.loads(RECORDED.read_text())
    recorded = sorted((row["claim"], row["part"], row["statement"]) for row in rows)
    assert recorded == sorted((claim.claim, claim.part, claim.statement) for claim in CLAIMS)
    pictures = {path.stem for path in RECORDED.parent.glob("*.png")}
    assert {row["claim"] for row in rows} - {"table1", "descent"} == pictures
