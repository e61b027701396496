"""Figures end to end with fake training: shared runs, resumption, tuning by grids, the command."""

import io
import json
import math
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from lightning_sv.cli.paper import run as run_paper
from lightning_sv.corpus import Manifest
from lightning_sv.errors import ConfigError
from lightning_sv.experiments.arms import RunRequest
from lightning_sv.experiments.evaluate import evaluate
from lightning_sv.experiments.kinds.grid import TUNING_SEED
from lightning_sv.experiments.plan import plan_figure
from lightning_sv.experiments.report.results_csv import read_recorded
from lightning_sv.experiments.report.tuned import write_tuned
from lightning_sv.experiments.report.write import write_report
from lightning_sv.experiments.resolver import RunResolver
from lightning_sv.experiments.results import Figure, PlannedFigure
from lightning_sv.experiments.run_store import RunStore, train_missing
from lightning_sv.experiments.spec import Budget, load_budget, load_figure
from lightning_sv.runs.job import Job
from lightning_sv.runs.launch import run_jobs
from lightning_sv.settings.words import values_of
from tests.conftest import thinned
from tests.experiments.fake_fit import write_scalars
from tests.experiments.test_compare import FAKE
from tests.experiments.test_plan import FIGURE, plan_mine

NOT_TESTABLE = "not testable here"


def quiet() -> Console:
    return Console(file=io.StringIO(), width=300)


def cpu() -> Budget:
    """Return the budget `cpu` without tuned optima, with three seeds."""
    budget = load_budget("cpu")
    models = {role: replace(model, tuned="") for role, model in budget.models.items()}
    return replace(budget, models=models, seeds=3, first_seed=0)


def plan(*names: str) -> list[PlannedFigure]:
    resolver = RunResolver(cpu(), {}, Path("conf"))
    return [plan_figure(load_figure(name), resolver) for name in names]


def table_of(figure: Figure) -> pd.DataFrame:
    """Return a row per verdict; equal to another also where both have NaN."""
    return pd.DataFrame(list(map(asdict, figure.verdicts)))


def train_all(figures: list[PlannedFigure], runs: RunStore) -> tuple[dict[str, str], str]:
    """Return the failures, and what was printed."""
    console = quiet()
    failed = train_missing(figures, runs, parallel=2, console=console)
    return failed, console.file.getvalue()  # type: ignore[attr-defined]


def trained(out: Path, *fake: str) -> tuple[PlannedFigure, RunStore]:
    """Return a figure of three arms on three seeds, with its runs."""
    (figure,) = plan("heterogeneity")
    runs = RunStore(out, launcher=(*FAKE, *fake))
    train_all([figure], runs)
    return figure, runs


def judged(figure: PlannedFigure, runs: RunStore) -> Figure:
    (found,) = evaluate([figure], runs)
    return found


def requests_of_arm(figure: PlannedFigure, label: str) -> list[RunRequest]:
    (arm,) = (arm for arm in figure.panels[0].arms if arm.label == label)
    return arm.requests


def remove(runs: RunStore, requests: Iterable[RunRequest]) -> None:
    for request in requests:
        (runs.dir(request) / "summary.json").unlink()


def diverge(runs: RunStore, requests: Iterable[RunRequest]) -> None:
    for request in requests:
        remove(runs, [request])
        (runs.dir(request) / "nonfinite.jsonl").write_text('{"step": 5}\n')


def job(run_dir: Path, *words: str, launcher: tuple[str, ...] = FAKE) -> Job:
    words = ("--model.scale", "hg", "--seed_everything", "0", *words)
    return Job("hg, seed 0", launcher, words, run_dir)


def test_job_interrupted_is_resumed_with_its_log(tmp_path: Path) -> None:
    first = job(tmp_path / "r")
    assert first.state() == "new" and first.command[-2:] == ["--ckpt_path", "last"]
    first.prepare()
    (first.run_dir / "checkpoint").touch()
    first.log.write_text("of the first attempt\n")
    assert first.state() == "resume"
    run_jobs([first], parallel=1, console=quiet())
    assert first.state() == "complete" and (first.run_dir / "checkpoint").exists()
    log = first.log.read_text()
    assert log.startswith("of the first attempt\n") and "step 1/10" in log


@pytest.mark.parametrize("code", ["sys.exit(143)", "os.kill(os.getpid(), 15)"])
def test_run_jobs_signal_is_not_a_failure(tmp_path: Path, code: str) -> None:
    stopped = job(tmp_path / "r", launcher=(sys.executable, "-c", f"import os, sys; {code}"))
    with pytest.raises(RuntimeError, match="hg, seed 0"):
        run_jobs([stopped], parallel=1, console=quiet())
    assert stopped.state() == "resume"


def test_train_shared_arms_once_complete_runs_skipped(tmp_path: Path) -> None:
    figure, runs = trained(tmp_path)
    assert len(list((tmp_path / "runs").iterdir())) == 9
    # one run is removed; qkv-dynamics adds unified, and unified with dp at the lm_head
    remove(runs, figure.requests()[:1])
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/summary.json")}
    _, printed = train_all(plan("heterogeneity", "qkv-dynamics"), runs)
    assert "8 of 27 runs are complete" in printed and printed.count(": done in") == 19
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    # the config files of a run are those of its plan
    job = runs.job(figure.requests()[0])
    assert list(job.configs) == values_of(job.arguments, "config") != []
    # a different torch refuses to train, and still reads the runs
    with pytest.raises(ConfigError, match="torch"):
        RunStore(tmp_path, {"torch": "9"}, FAKE).missing(figure.requests())
    assert RunStore(tmp_path, None, FAKE).missing(figure.requests()) == []


def test_evaluate_failed_runs_other_seeds_are_judged(tmp_path: Path) -> None:
    """Seed 1 of each arm fails, other seeds are evaluated; without runs, the claim has a reason."""
    (figure,) = plan("heterogeneity")
    runs = RunStore(tmp_path, launcher=(*FAKE, "--fail_seed", "1"))
    failed, _ = train_all([figure], runs)
    assert ["simulated failure" in reason for reason in failed.values()] == [True] * 3
    found = judged(figure, runs)
    assert [verdict.n for verdict in found.verdicts] == [2] and len(found.warnings) == 1
    remove(runs, [request for request in figure.requests() if request[1] != 1])
    found = judged(figure, runs)
    assert [verdict.verdict for verdict in found.verdicts] == [NOT_TESTABLE]
    assert found.panels == () and "9 of its runs" in found.verdicts[0].sentence


GRID = """title: t
section: s
summary: s
panels:
- title: p
  kind: grid
  axes:
    model.optim.lr: {cpu: [0.001, 0.002, 0.004]}
    model.backbone.init_std: {cpu: [0.01, 0.02, 0.04]}
  arms:
    llama: {scale: llama, baseline: true, axes: {model.optim.lr: {cpu: [0.0011, 0.0022, 0.0044]}}}
    unified: {scale: unified}
  claims: [{kind: grid_gap, a: unified, b: llama, paper: x}]
"""
BUDGET = "summary: s\nlayers: [trainer/cpu, data/stdlib]\nseeds: 2\nmodels:\n"
TINY = "{config: tiny, tuned: tiny-3000, seconds_per_1000_steps: 13}\n"


def tiny_with(overrides: str) -> str:
    return TINY.replace("tiny, ", f"tiny, overrides: {{{overrides}}}, ", 1)


@pytest.mark.long
def test_write_tuned_grid_tunes_the_arms_of_other_figures(conf: Path, tmp_path: Path) -> None:
    """The optimum of the fake losses is found on tuning seeds; then all arms have it."""
    keys = "model.backbone.name: small, model.backbone.d_model: 16, model.optim.lr: 0.006"
    models = f"  dense: {TINY}  dense-1: {tiny_with(keys)}"
    (conf / "paper/budgets/cpu.yaml").write_text(BUDGET + models)
    figure = FIGURE.replace("scale: hg", "scale: hg+dnp")

    def planned(text: str, **changes: str) -> PlannedFigure:
        (conf / "paper/mine.yaml").write_text(text)
        spec = load_figure("mine", conf)
        spec = replace(spec, panels=[replace(spec.panels[0], **changes)])
        return plan_figure(spec, RunResolver(load_budget("cpu", conf), {}, conf))

    assert "tuned/tiny-3000.yaml" in planned(figure).panels[0].warnings[0]
    assert planned(figure, tuned_as="own").panels[0].why_not is not None

    grid = planned(GRID)
    assert {seed for _, seed in grid.requests()} == {TUNING_SEED, TUNING_SEED + 1}
    runs = RunStore(tmp_path / "out", launcher=(*FAKE, "--best", "0.0022", "0.025"))
    train_all([grid], runs)
    found = judged(grid, runs)
    write_tuned([found], conf / "paper")  # a grid of another figure
    assert not (conf / "paper/tuned/tiny-3000.yaml").exists()
    tuning = replace(found, spec=replace(found.spec, name="tuning"), command="by tuning")
    write_tuned([tuning], conf / "paper")
    assert "by tuning; seeds 100, 101" in (conf / "paper/tuned/tiny-3000.yaml").read_text()

    llama, dnp = (arm.run_spec for arm in planned(figure).panels[0].arms)
    for run_spec in (llama, dnp):
        assert "lr 0.0022, init_std 0.025" in run_spec.details
    shared = planned(figure, tuned_as="llama").panels[0].arms[1].run_spec
    assert "llama" in shared.note
    narrow = planned(figure, model="dense-1").panels[0].arms[0].run_spec
    assert "init_std 0.05" in narrow.details  # a quarter of the width, twice the std
    other_schedule = planned(figure, schedule="wsd").panels[0].arms[0].run_spec
    assert "init_std" not in other_schedule.details


@pytest.mark.parametrize("kind", ["lengths", "scaling"])
def test_plan_figure_points_are_in_order_and_named_by_the_baseline(conf: Path, kind: str) -> None:
    """The primary claim is that of the last point."""
    text = FIGURE.replace("scale: llama", "scale: llama, baseline: true")
    text = text.replace("  arms", f"  kind: {kind}\n  models: [dense, dense-2]\n  arms")
    names = {
        "lengths": ("1.34 tokens a parameter", "6.69 tokens a parameter"),
        "scaling": ("small", "tiny"),
    }
    keys = "trainer.max_steps: 600, model.backbone.name: small"
    if kind == "scaling":
        keys += ", model.backbone.d_ff: 64"
    short = tiny_with(keys)
    budget = conf / "paper/budgets/cpu.yaml"
    budget.write_text(f"{BUDGET}  dense: {TINY}  dense-2: {short}")
    (panel,) = plan_mine(conf, text).panels
    for series in ("a", "b"):
        points = [arm for arm in panel.arms if arm.series == series]
        assert tuple(arm.size for arm in points) == names[kind]
        assert [arm.run_spec.steps for arm in points] == [600, 3000]
    budget.write_text(f"{BUDGET}  dense: {TINY}  dense-2: {TINY}")
    with pytest.raises(ConfigError, match=kind):
        plan_mine(conf, text)


@pytest.mark.long
def test_evaluate_diverged_runs_are_left_out_and_recorded(conf: Path, tmp_path: Path) -> None:
    grid = plan_mine(conf, GRID)
    (other,) = plan("heterogeneity")
    figures = [grid, other]
    runs = RunStore(tmp_path / "out", {"corpus_hash": "c0ffee"}, FAKE)
    train_all(figures, runs)
    at_a_point = requests_of_arm(grid, "unified, lr 0.002, init_std 0.02")
    of_hg = requests_of_arm(other, "hg")
    diverge(runs, [at_a_point[1], of_hg[0]])
    failed, _ = train_all(figures, runs)
    assert failed == {}
    # a run may also end with a loss that is not finite
    (first, _) = requests_of_arm(grid, "unified, lr 0.004, init_std 0.02")
    ended = runs.dir(first)
    summary = json.loads((ended / "summary.json").read_text()) | {"val_loss": math.nan}
    (ended / "summary.json").write_text(json.dumps(summary))
    write_scalars(ended, "val/loss", [(10_000, math.nan)], wall_time=3.0)

    found = evaluate(figures, runs)
    assert len(found[0].panels[0].series[1].arms) == 7
    assert "unified, lr 0.002" in found[0].warnings[0] and "lr 0.004" in found[0].warnings[0]
    (verdict,) = found[1].verdicts
    assert verdict.n == 2 and "left out: 1" in verdict.sentence
    write_report(found, tmp_path / "report", "cpu")
    recorded = RunStore(tmp_path / "elsewhere", None, FAKE, read_recorded([tmp_path / "report"]))
    assert recorded.missing([*grid.requests(), *other.requests()]) == []
    for again, before in zip(evaluate(figures, recorded), found, strict=True):
        assert again.warnings == before.warnings
        pd.testing.assert_frame_equal(table_of(again), table_of(before))


@pytest.mark.parametrize("named", [
    ("--model.scale", "hg+my_scales:Mine"),
    ("--model.schedule.name", "my_scales:linear"),
    ("--trainer.callbacks+", "my_scales.Log"),
    ("--config", "own.yaml"),
])  # fmt: skip
def test_job_named_modules_are_hashed(
    named: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    callback = "{class_path: my_scales.Log, init_args: {every: 2}}"
    (tmp_path / "own.yaml").write_text(f"trainer: {{callbacks: [{callback}]}}")
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "my_scales.py"
    module.write_text("raise RuntimeError('imported')\n")
    mine = job(tmp_path / "run", *named)
    mine.prepare()
    assert mine.state() == "resume"
    module.write_text("# edited\n")
    with pytest.raises(ConfigError, match="my_scales"):
        mine.state()


def test_run_jobs_parallel_runs_have_separate_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """if 1:
        import os, sys, time, pathlib
        run = pathlib.Path(sys.argv[sys.argv.index("--run_dir") + 1])
        (run / "summary.json").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
        time.sleep(1)
    """
    launcher = (sys.executable, "-c", code)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    jobs = [job(tmp_path / str(i), launcher=launcher) for i in range(4)]
    run_jobs(jobs, parallel=2, console=quiet())
    devices = [(each.run_dir / "summary.json").read_text() for each in jobs]
    assert sorted(devices) == ["3", "3", "5", "5"]
    alone = job(tmp_path / "all", launcher=launcher)
    run_jobs([alone], parallel=1, console=quiet())
    assert (alone.run_dir / "summary.json").read_text() == "3,5"


def test_paper_command_dry_run_slurm_train_report(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr("lightning_sv.cli.paper.load_budget", lambda name: cpu())
    keys = {"data.corpus.dir": str(corpus), "data.corpus.tokenizer": "bpe:300"}
    words = ["--fig", "heterogeneity", "--out", str(out), "--jobs", "2"]
    words += [f"--{key}={value}" for key, value in keys.items()]

    assert run_paper([*words, "--dry-run"]) == 0
    listed = " ".join(capsys.readouterr().out.split())
    assert "heterogeneity 9 runs, alone about 3 min, 2 at a time" in listed and not out.exists()
    figure = plan_figure(load_figure("heterogeneity"), RunResolver(cpu(), keys))
    run_spec, _ = figure.requests()[0]
    assert run_spec.epochs == run_spec.tokens / Manifest.load(corpus).train.tokens
    assert f" {run_spec.tokens_per_param:.1f} {run_spec.epochs:.2f} " in listed

    assert run_paper([*words, "--slurm"]) == 0
    assert f"sbatch {out / 'slurm.sh'}" in capsys.readouterr().out
    assert (out / "slurm.sh").read_text().startswith("#!/bin/bash\n# 9 runs")

    assert run_paper(words, launcher=FAKE) == 0
    assert "Holds: hg - shared is" in " ".join(capsys.readouterr().out.split())
    assert load_budget("cpu").caution in (out / "report.md").read_text()
    (out / "verdicts.csv").unlink()
    assert run_paper([*words, "--no_train"]) == 0
    verdicts = pd.read_csv(out / "verdicts.csv")
    assert verdicts[["figure", "verdict"]].to_numpy().tolist() == [["heterogeneity", "holds"]]

    recorded = ["--no_train", "--results_from", str(out)]
    there = tmp_path / "there"
    assert run_paper([*words, "--out", str(there), *recorded]) == 0
    pd.testing.assert_frame_equal(pd.read_csv(there / "verdicts.csv"), verdicts)
    assert f"--results_from {out}" in (there / "report.md").read_text()
    assert not (there / "runs").exists()


WRONG = [
    (["--fig", "plcement"], "'plcement'"),
    (["--budget", "gpuu"], "'gpuu'"),
    (["--budget", "cpu-long", "--fig", "protocol"], "lightning-sv sweep"),
    (["--budget", "gpu-25", "--fig", "own-optimum-mini"], "tuned/mini-12891"),
    (["--fig", "iwd", "--data.corpus.dir", "data/no"], "data.corpus.dir"),
    (["--jobs", "0"], "--jobs"),
    (["--fig", "iwd", "--data.corpus.dir"], "--data.corpus.dir"),
    (["--fig", "iwd", "--model.scale", "hg"], "--model.scale"),
    (["--fig", "iwd", "--model.scale_options.placement_at", "{lm_head: dp"], "placement_at"),
    (["--fig", "iwd", "--no_train", "--out", "nowhere"], "nowhere"),
    (["--fig", "iwd", "--no_train", "--results_from", "nowhere"], "--results_from is nowhere"),
    (["--dry-run", "--slurm"], "--dry_run"),
]


@pytest.mark.parametrize(("words", "key"), thinned(WRONG, WRONG[::2], several=True))
def test_paper_command_wrong_arguments_refused(words: list[str], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        run_paper(words)


def test_train_runs_whose_own_code_has_changed_are_refused(
    conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    own = tmp_path / "changing_scales.py"
    own.write_text(
        "from lightning_sv.scale import DirectScale\n\n\nclass Mine(DirectScale):\n    pass\n"
    )
    figure = plan_mine(conf, FIGURE.replace("hg", "hg+changing_scales:Mine"))
    runs = RunStore(tmp_path / "out", {}, FAKE)
    train_all([figure], runs)
    assert runs.missing(figure.requests()) == []
    own.write_text(own.read_text() + "# edited\n")
    with pytest.raises(ConfigError, match="changing_scales"):
        runs.missing(figure.requests())
    (panel,) = judged(figure, replace(runs, context=None)).panels  # read as they are
    assert [len(arm.runs) for arm in panel.arms] == [2, 2]
