"""Figures end to end with fake training: shared runs, resumption, tuning by grids, the command."""

import io
import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from lightning_sv.cli.paper import run as run_paper
from lightning_sv.corpus import Manifest
from lightning_sv.errors import ConfigError
from lightning_sv.experiments.comparability import comparability_warnings
from lightning_sv.experiments.evaluate import evaluate
from lightning_sv.experiments.kinds.grid import TUNING_SEED
from lightning_sv.experiments.plan import plan_figure
from lightning_sv.experiments.report.results_csv import read_recorded
from lightning_sv.experiments.report.tuned import write_tuned
from lightning_sv.experiments.report.write import write_report
from lightning_sv.experiments.resolver import RunResolver
from lightning_sv.experiments.results import Figure, PlannedFigure
from lightning_sv.experiments.run_store import RunStore, train
from lightning_sv.experiments.spec import Budget, load_budget, load_figure
from lightning_sv.runs.events import Curve, Run
from lightning_sv.runs.job import Job
from lightning_sv.runs.launch import run_jobs
from tests.conftest import edit_json, thinned
from tests.experiments.fake_fit import write_scalars
from tests.experiments.test_compare import FAKE
from tests.experiments.test_plan import FIGURE, plan_mine


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def cpu() -> Budget:
    """The budget `cpu` without tuned optima, with three seeds."""
    budget = load_budget("cpu")
    models = {role: replace(model, tuned="") for role, model in budget.models.items()}
    return replace(budget, models=models, seeds=3, first_seed=0)


def plan(*names: str) -> list[PlannedFigure]:
    resolver = RunResolver(cpu(), {}, Path("conf"))
    return [plan_figure(load_figure(name), resolver) for name in names]


def judged(figure: PlannedFigure, runs: RunStore) -> Figure:
    (found,) = evaluate([figure], runs)
    return found


def job(run_dir: Path, *, torch: str = "2.13.0", launcher: tuple[str, ...] = FAKE) -> Job:
    words = ("--model.scale", "hg", "--seed_everything", "0")
    return Job("hg, seed 0", launcher, words, run_dir, {"torch": torch})


def test_job_interrupted_resumed_different_torch_refused(tmp_path: Path) -> None:
    first = job(tmp_path / "r")
    assert first.state() == "new" and first.command[-2:] == ["--ckpt_path", "last"]
    first.prepare()
    (first.run_dir / "checkpoint").touch()
    first.log.write_text("of the first attempt\n")
    assert first.state() == "resume"
    with pytest.raises(ConfigError, match="torch.*2.13.0.*2.14.0"):
        job(tmp_path / "r", torch="2.14.0").prepare()
    run_jobs([first], parallel=1, console=quiet())
    assert first.state() == "complete" and (first.run_dir / "checkpoint").exists()
    assert (
        first.log.read_text().startswith("of the first attempt\n")
        and "step 1/10" in first.log.read_text()
    )
    with pytest.raises(ConfigError, match="torch"):
        job(tmp_path / "r", torch="2.14.0").prepare()


@pytest.mark.parametrize("code", ["sys.exit(143)", "os.kill(os.getpid(), 15)"])
def test_run_jobs_signal_is_not_a_failure(tmp_path: Path, code: str) -> None:
    launcher = (sys.executable, "-c", f"import os, sys; {code}")
    with pytest.raises(
        RuntimeError, match=r"hg, seed 0 was stopped by a signal; the same command resumes it"
    ):
        run_jobs([job(tmp_path / "r", launcher=launcher)], parallel=1, console=quiet())
    assert job(tmp_path / "r", launcher=launcher).state() == "resume"


def test_train_shared_arms_once_complete_runs_skipped(tmp_path: Path) -> None:
    (figure,) = plan("heterogeneity")
    runs = RunStore(tmp_path, launcher=FAKE)
    train([figure], runs, parallel=2, console=quiet())
    assert len(list((tmp_path / "runs").iterdir())) == 9
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/summary.json")}
    # one run is removed; qkv-dynamics adds unified, and unified with dp at the lm_head
    gone = runs.dir(*figure.requests()[0]) / "summary.json"
    gone.unlink()
    said = quiet()
    train(plan("heterogeneity", "qkv-dynamics"), runs, parallel=2, console=said)
    text = said.file.getvalue()  # type: ignore[attr-defined]
    assert "8 of 27 runs are complete" in text and text.count(": done in") == 19
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items() if path != gone)
    # a different torch refuses to train, and still reads the runs
    with pytest.raises(ValueError, match="torch was None, now 9"):
        RunStore(tmp_path, {"torch": "9"}, FAKE).missing(figure.requests())
    assert RunStore(tmp_path, None, FAKE).missing(figure.requests()) == []


def test_evaluate_failed_runs_other_seeds_are_judged(tmp_path: Path) -> None:
    """Seed 1 of each arm fails, other seeds are trained and evaluated; without runs, the claim has
    the reason."""
    (figure,) = plan("heterogeneity")
    runs = RunStore(tmp_path, launcher=(*FAKE, "--fail_seed", "1"))
    failed = train([figure], runs, parallel=2, console=quiet())
    assert len(failed) == 3 and all("simulated failure" in why for why in failed.values())
    assert len(list((tmp_path / "runs").glob("*/summary.json"))) == 6
    found = judged(figure, runs)
    (verdict,), (warning,) = found.verdicts, found.warnings
    assert verdict.n == 2 and "3 of its runs did not finish" in warning
    for summary in tmp_path.glob("runs/*/summary.json"):
        summary.unlink()
    found = judged(figure, runs)
    assert [v.verdict for v in found.verdicts] == ["not testable here"] and found.panels == ()
    assert "9 of its runs did not finish, the first being tiny, llama" in found.verdicts[0].sentence


def test_evaluate_claim_needs_the_runs_of_its_own_arms_only(tmp_path: Path) -> None:
    (figure,) = plan("heterogeneity")
    runs = RunStore(tmp_path, launcher=FAKE)
    train([figure], runs, parallel=2, console=quiet())
    (panel,) = figure.panels
    (own,) = panel.spec.claims
    of_missing = replace(own, a="hg+dp+or")
    panel = replace(panel, spec=replace(panel.spec, claims=[own, of_missing]))
    for request in panel.arm("hg+dp+or").requests:
        (runs.dir(*request) / "summary.json").unlink()

    found = judged(replace(figure, panels=(panel,)), runs)
    judged_claim, untested = found.verdicts
    assert judged_claim.n == 3 and judged_claim.p is not None
    assert untested.verdict == "not testable here" and "hg+dp+or" in untested.sentence
    assert [arm.label for arm in found.panels[0].arms] == ["shared", "hg"]


def test_evaluate_claim_at_one_size_needs_no_other_size(tmp_path: Path) -> None:
    """The sizes with runs are judged; a law needs all of them, and arms may have fewer seeds than
    the panel."""
    spec = load_figure("dense-scaling")
    (panel,) = (each for each in spec.panels if each.title == "Dense models")
    claims = [claim for claim in panel.claims if claim.kind in ("less", "slope")]
    of_two = {label: replace(arm, seeds={"cpu": 2}) for label, arm in panel.arms.items()}
    spec = replace(spec, panels=[replace(panel, claims=claims, arms=of_two)])
    figure = plan_figure(spec, RunResolver(cpu(), {}))
    runs = RunStore(tmp_path, launcher=FAKE)
    train([figure], runs, parallel=2, console=quiet())
    lost = figure.panels[0].arm(f"unified, {figure.panels[0].arms[0].size}")
    for request in lost.requests:
        (runs.dir(*request) / "summary.json").unlink()

    found = judged(figure, runs)
    at_sizes = [verdict for verdict in found.verdicts if "ends below" in verdict.claim]
    assert {verdict.n for verdict in at_sizes} == {0, 2}
    untested = [verdict for verdict in found.verdicts if verdict.verdict == "not testable here"]
    assert all(lost.label in verdict.sentence for verdict in untested)
    assert any("falls faster" in verdict.claim for verdict in untested)


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


@pytest.mark.long
def test_write_tuned_grid_tunes_the_arms_of_other_figures(conf: Path, tmp_path: Path) -> None:
    """The optimum of the fake losses is found on tuning seeds and written; then all arms have
    it."""
    keys = "{model.backbone.name: small, model.backbone.d_model: 16, model.optim.lr: 0.006}"
    small = TINY.replace("tiny, ", f"tiny, overrides: {keys}, ", 1)
    (conf / "paper/budgets/cpu.yaml").write_text(f"{BUDGET}  dense: {TINY}  dense-1: {small}")
    (conf / "paper/mine.yaml").write_text(GRID)
    (conf / "paper/other.yaml").write_text(FIGURE.replace("scale: hg", "scale: hg+dnp"))
    runs = RunStore(tmp_path / "out", launcher=(*FAKE, "--best", "0.0022", "0.025"))

    def planned(name: str, change: str = "") -> PlannedFigure:
        spec = load_figure(name, conf)
        if change:
            spec = replace(
                spec, panels=[replace(spec.panels[0], **{change.split()[0]: change.split()[1]})]
            )
        return plan_figure(spec, RunResolver(load_budget("cpu", conf), {}, conf))

    grid = planned("mine")
    assert len(grid.requests()) == 2 * 9 * 2 and {seed for _, seed in grid.requests()} == {
        TUNING_SEED,
        TUNING_SEED + 1,
    }
    before = planned("other")
    assert (
        "have one learning rate and initial std: conf/paper/tuned/tiny-3000.yaml"
        in before.panels[0].warnings[0]
    )
    assert "does not exist yet" in str(planned("other", "tuned_as own").panels[0].why_not)
    train([grid], runs, parallel=2, console=quiet())
    found = judged(grid, runs)
    write_tuned([found], conf / "paper")
    text = (conf / "paper/tuned/tiny-3000.yaml").read_text()
    assert "; seeds 100 to 101, commit " in text and "# times or over 1." in text
    (panel,) = found.panels
    point = replace(panel.arms[0], label="elsewhere", series="llama, elsewhere")
    twice = replace(
        panel, arms=(point, *panel.arms)
    )  # of two arms of one strategy, the lower one is written
    tuning = replace(
        found, spec=replace(found.spec, name="tuning"), panels=(twice,), command="by tuning"
    )
    write_tuned([found, tuning], tmp_path)  # of two grids of one length, `tuning`
    text = (tmp_path / "tuned/tiny-3000.yaml").read_text()
    assert (
        text.startswith('source: "by tuning; ')
        and text.count('"llama"') == 1
        and "optim.lr: 0.0022" in text
    )
    llama, dnp = (arm.run_spec for arm in planned("other").panels[0].arms)
    assert "lr 0.0022, init_std 0.025" in llama.details and llama.note == ""
    assert "lr 0.0022, init_std 0.025" in dnp.details
    assert dnp.note == "hg+dnp is not tuned itself: it has the values of hg+dnp+or+iwd."
    shared = planned("other", "tuned_as llama").panels[0].arms[1].run_spec
    assert shared.note == "All arms have the learning rate and the initial std of llama."
    narrow = planned("other", "model dense-1").panels[0].arms[0].run_spec
    assert "init_std 0.05" in narrow.details  # a quarter of the width, twice the std
    text = (
        FIGURE.replace("scale: llama", "scale: llama, baseline: true")
        .replace("scale: hg", "scale: hg+dnp")
        .replace("  arms", "  kind: lengths\n  models: [dense-2, dense]\n  tuned_as: own\n  arms")
    )
    (conf / "paper/lengths.yaml").write_text(text)
    short = TINY.replace("tiny, ", "tiny, overrides: {trainer.max_steps: 600}, ", 1)
    (conf / "paper/budgets/cpu.yaml").write_text(f"{BUDGET}  dense: {TINY}  dense-2: {short}")
    assert planned("lengths").tokens_per_param == pytest.approx((1.32, 6.69), abs=5e-3)
    assert planned("other").tokens_per_param == pytest.approx((6.62, 6.62), rel=0.02)
    (panel,) = planned("lengths").panels
    lengths = (
        "1.34 tokens a parameter",
        "6.69 tokens a parameter",
    )  # the baseline's: b has more scale vectors
    assert [tuple(arm.size for arm in series.arms) for series in panel.series] == [lengths, lengths]
    (shorter,) = (arm.run_spec for arm in panel.arms if arm.label == "b, 1.34 tokens a parameter")
    assert shorter.steps == 600 and f"{shorter.tokens_per_param:.3g}" == "1.32"
    (conf / "paper/other.yaml").write_text(FIGURE + "  schedule: wsd\n")
    other = planned("other").panels[0].arms[0].run_spec
    assert "init_std" not in other.details  # tuned under a different schedule
    (conf / "paper/budgets/cpu.yaml").write_text(f"{BUDGET}  dense: {TINY}  dense-2: {TINY}")
    for kind in ("lengths", "scaling"):
        (conf / "paper/lengths.yaml").write_text(text.replace("kind: lengths", f"kind: {kind}"))
        with pytest.raises(ConfigError, match=f"its {kind} is"):
            planned("lengths")


@pytest.mark.long
def test_evaluate_diverged_points_of_a_grid_left_out(conf: Path, tmp_path: Path) -> None:
    figures = [plan_mine(conf, GRID), *plan("heterogeneity")]
    runs = RunStore(tmp_path / "out", {"corpus_hash": "c0ffee"}, FAKE)
    train(figures, runs, parallel=2, console=quiet())

    def diverge(*run: Any) -> None:
        (runs.dir(*run) / "summary.json").unlink()
        (runs.dir(*run) / "nonfinite.jsonl").write_text('{"step": 5}\n')

    grid, other = (figure.panels[0] for figure in figures)
    skipping, seed = next(arm for arm in other.arms if arm.label == "hg").requests[1]
    diverge(skipping, seed)  # interrupted after a skipped step: it is resumed
    (runs.dir(skipping, seed) / "config.yaml").write_text("model: {nonfinite: skip}\n")
    diverge(
        next(arm for arm in grid.arms if arm.label == "unified, lr 0.002, init_std 0.02").run_spec,
        101,
    )
    diverge(next(arm for arm in other.arms if arm.label == "hg").run_spec, 0)
    said = Console(file=io.StringIO(), width=300)
    assert train(figures, runs, parallel=2, console=said) == {}
    assert said.file.getvalue().count(" diverged; remove ") == 2  # type: ignore[attr-defined]
    ended = runs.dir(
        next(arm for arm in grid.arms if arm.label == "unified, lr 0.004, init_std 0.02").run_spec,
        100,
    )
    summary = ended / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"val_loss": float("nan")}))
    write_scalars(ended, "val/loss", [(10_000, float("nan"))], wall_time=3.0)
    found, other_one = (judged(figure, runs) for figure in figures)
    for rate in ("0.002", "0.004"):
        assert f"runs of unified, lr {rate}, init_std 0.02 diverged" in found.warnings[0]
    assert len(found.panels[0].series[1].arms) == 7
    assert any("1 of 3 runs of hg diverged." in w for w in other_one.warnings)
    (verdict,) = other_one.verdicts
    assert verdict.n == 2 and "diverged runs of hg, which are left out: 1" in verdict.sentence
    before = evaluate(figures, runs)
    write_report(before, tmp_path / "report", "cpu")
    recorded = RunStore(tmp_path / "elsewhere", None, FAKE, read_recorded([tmp_path / "report"]))
    assert recorded.missing([run for figure in figures for run in figure.requests()]) == []
    for figure, was in zip(evaluate(figures, recorded), before, strict=True):
        assert figure.warnings == was.warnings
        assert [asdict(verdict) for verdict in figure.verdicts] == [
            asdict(verdict) for verdict in was.verdicts
        ]
    for seed in (1, 2):
        diverge(next(arm for arm in other.arms if arm.label == "hg").run_spec, seed)
    lost = judged(figures[1], runs)
    assert lost.verdicts[0].sentence == "Not testable here: all runs of hg diverged."
    write_report([lost], tmp_path / "lost", "cpu")
    rows = read_recorded([tmp_path / "lost"]).values()
    assert len(rows) == 9 and sum(math.isnan(run.val_loss) for run in rows) == 3


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
    (tmp_path / "own.yaml").write_text(
        "trainer: {callbacks: [{class_path: my_scales.Log, init_args: {every: 2}}]}"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "my_scales.py"
    module.write_text("raise RuntimeError('imported')\n")
    mine = Job(
        "mine", FAKE, ("--model.scale", "llama", *named, "--seed_everything", "0"), tmp_path / "run"
    )
    run_jobs([mine], parallel=1, console=quiet())
    assert mine.state() == "complete"
    module.write_text("# edited\n")
    with pytest.raises(ValueError, match="my_scales has changed since"):
        mine.state()


def test_evaluate_runs_whose_own_code_has_changed_are_named(
    conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    own = tmp_path / "changing_scales.py"
    own.write_text(
        "from lightning_sv.scale import DirectScale\n\n\nclass Mine(DirectScale):\n    pass\n"
    )
    figure = plan_mine(conf, FIGURE.replace("hg", "hg+changing_scales:Mine"))
    trained = RunStore(tmp_path / "out", {}, FAKE)
    train([figure], trained, parallel=2, console=quiet())
    write_report(found := evaluate([figure], trained), tmp_path / "report", "cpu")
    recorded = RunStore(tmp_path / "elsewhere", None, FAKE, read_recorded([tmp_path / "report"]))
    assert (
        not found[0].warnings and "changing_scales" in evaluate([figure], recorded)[0].warnings[0]
    )
    own.write_text(own.read_text() + "# edited\n")
    assert "changing_scales" in evaluate([figure], replace(trained, context=None))[0].warnings[0]


def test_run_jobs_parallel_runs_have_separate_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """if 1:
        import os, sys, time, pathlib
        run = pathlib.Path(sys.argv[sys.argv.index("--run_dir") + 1])
        (run / "summary.json").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
        time.sleep(1)
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    jobs = [job(tmp_path / str(i), launcher=(sys.executable, "-c", code)) for i in range(4)]
    run_jobs(jobs, parallel=2, console=quiet())
    assert sorted((tmp_path / f"{i}/summary.json").read_text() for i in range(4)) == [
        "3",
        "3",
        "5",
        "5",
    ]
    run_jobs(
        [job(tmp_path / "all", launcher=(sys.executable, "-c", code))], parallel=1, console=quiet()
    )
    assert (tmp_path / "all/summary.json").read_text() == "3,5"


ENDS = Curve(np.array([1]), np.array([3.0]))


@pytest.mark.parametrize(("a", "b", "args", "unexpected"), [
    ({"x": {}}, {"x": {"lm_head": "dp"}}, ["x.lm_head"], []),
    ({"x": {}}, {"x": {"lm_head": "dp"}}, [], ["x.lm_head"]),
    ({"x": {}}, {}, [], []),
    ({"x": {"y": 1}}, {"x": {"y": 1, "later": None}}, [], []),
    ({"x": {"y": 1}}, {"x": {"y": 1, "later": 0}}, [], ["x.later"]),
    ({"x": {"y": 1}}, {"x": {"y": 2}}, ["x"], []),
    ({"x": {"y": 1}}, {"x": {"y": 2}}, ["x.yy"], ["x.y"]),
    ({"x": {"yy": 1}}, {"x": {"yy": 2}}, ["x.y"], ["x.yy"]),
    ({"seed_everything": 0, "model": {"seed": 0}}, {"seed_everything": 1, "model": {"seed": 1}}, [], []),
    ({"model": {"seed": None}}, {"model": {"seed": 5}}, [], ["model.seed"]),
])  # fmt: skip
def test_comparability_warnings_name_unexpected_keys(
    a: dict[str, Any], b: dict[str, Any], args: list[str], unexpected: list
) -> None:
    runs = {
        name: Run(Path(name), "x", config, {}, {"val/loss": ENDS})
        for name, config in (("a", a), ("b", b))
    }
    assert [
        warning.split(":")[0].split()[-1] for warning in comparability_warnings(runs, args)
    ] == unexpected


def test_evaluate_incomparable_runs_warned_or_refused(tmp_path: Path) -> None:
    (figure,) = plan("heterogeneity")
    runs = RunStore(tmp_path, launcher=FAKE)
    train([figure], runs, parallel=2, console=quiet())
    last = runs.dir(*figure.requests()[-1])
    edit_json(last / "config.yaml", hidden={"key": "other", "off": False, "one": 1})
    (warning,) = judged(figure, runs).warnings
    assert "The configs differ in hidden.key: same against other" in warning
    for key in ("built_by", "own_optimizer"):
        edit_json(last / "summary.json", **{key: "Own"})
        assert any("Own (" in warning for warning in judged(figure, runs).warnings)
        edit_json(last / "summary.json", **{key: None})
    edit_json(last / "summary.json", commit="0123456789abcdef, with uncommitted changes")
    assert "by different commits of the code: None (" in judged(figure, runs).warnings[-1]
    assert "0123456789, with uncommitted changes (" in judged(figure, runs).warnings[-1]
    edit_json(
        last / "summary.json",
        commit=None,
        machine="EPYC, 2 cores, 1 x A100, torch 2.13, Python 3.11",
    )
    assert "different machines: one not stated (" in judged(figure, runs).warnings[-1]
    assert "; EPYC, 2 cores, 1 x A100 (" in judged(figure, runs).warnings[-1]


@pytest.mark.long
def test_evaluate_sizes_of_a_law_need_one_corpus(tmp_path: Path) -> None:
    figure = plan_figure(load_figure("dense-scaling"), RunResolver(replace(cpu(), seeds=2), {}))
    runs = RunStore(tmp_path, launcher=FAKE)
    train([figure], runs, parallel=2, console=quiet())
    before = judged(figure, runs)
    assert before.warnings == () and len(before.panels[0].arms) == 12
    tiny = [
        runs.dir(run_spec, seed) for run_spec, seed in figure.requests() if run_spec.model == "tiny"
    ]
    for path in tiny:
        data = json.loads((path / "config.yaml").read_text())["data"]
        edit_json(path / "config.yaml", data=data | {"seq_len": 128})
    (warning,) = judged(figure, runs).warnings
    assert "the sizes of one law have data.seq_len 64 and 128." in warning
    for path in tiny:
        edit_json(path / "summary.json", corpus_hash="beef")
    with pytest.raises(ValueError, match="corpus_hash"):
        judged(figure, runs)


def test_paper_command_dry_run_slurm_train_report(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr("lightning_sv.cli.paper.load_budget", lambda name: cpu())
    words = [
        "--budget",
        "cpu",
        "--fig",
        "heterogeneity",
        "overhead",
        "--out",
        str(out),
        "--jobs",
        "2",
    ]
    keys = {"data.corpus.dir": str(corpus), "data.corpus.tokenizer": "bpe:300"}
    words += [f"--{key}={value}" for key, value in keys.items()]
    assert run_paper([*words, "--dry-run"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "heterogeneity 9 runs, alone about 3 min, 2 at a time" in said
    assert "Throughput of training runs: not testable here" in said and not out.exists()
    (run_spec, _), *_ = plan_figure(
        load_figure("heterogeneity"), RunResolver(cpu(), keys)
    ).requests()
    assert run_spec.epochs == run_spec.tokens / Manifest.load(corpus).train.tokens
    assert f" {run_spec.tokens_per_param:.1f} {run_spec.epochs:.2f} " in said
    assert run_paper([*words, "--slurm"]) == 0
    assert (
        capsys.readouterr().out.startswith("#!/bin/bash\n# 9 runs") and (out / "slurm.sh").exists()
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"slurm\.sh"):
        run_paper([*words, "--slurm", "--submit"])
    reported: list[tuple[list[Figure], Path, str, str]] = []
    monkeypatch.setattr(
        "lightning_sv.experiments.report.write.write_report", lambda *given: reported.append(given)
    )
    assert run_paper(words, launcher=FAKE) == 0
    ((figures, where, budget, caution),) = reported
    assert caution == load_budget("cpu").caution != ""
    assert [figure.spec.name for figure in figures] == ["heterogeneity", "overhead"]
    assert (where, budget) == (out, f"cpu: {load_budget('cpu').summary}")
    table = figures[1].panels[0]
    assert table.spec.kind == "table"
    assert {"llama", "unified"} <= set(table.table.frame.strategy.str.partition(",")[0])
    assert [v.verdict for v in figures[1].verdicts] == ["not testable here"] * 2
    assert "Holds: hg - shared is" in " ".join(capsys.readouterr().out.split())
    assert run_paper([*words, "--no_train", "--json"]) == 0
    printed = capsys.readouterr()
    made = json.loads(printed.out)
    assert "Holds: hg - shared is" in " ".join(printed.err.split()) and made["failed"] == {}
    (shown, _), (verdict,) = made["figures"], figures[0].verdicts
    assert shown["figure"] == "heterogeneity" and shown["verdicts"] == [asdict(verdict)]


WRONG = [
    (["--fig", "plcement"], "'plcement'"),
    (["--budget", "gpuu"], "'gpuu'"),
    (["--budget", "cpu-long", "--fig", "protocol"], "protocol.*cpu-long.*lightning-sv sweep"),
    (
        ["--budget", "cpu-mini", "--fig", "own-optimum"],
        "tuned/mini-2578.*paper --budget cpu-mini --fig tuning",
    ),
    (
        ["--fig", "iwd", "--data.corpus.dir", "data/no"],
        "data.corpus.dir is data/no.*prepare --config .*--data.corpus",
    ),
    (["--submit"], "--submit"),
    (["--jobs", "0"], "--jobs"),
    (["--fig", "iwd", "--data.corpus.dir"], "--data.corpus.dir"),
    (["--fig", "iwd", "--model.scale", "hg"], "--model.scale"),
    (["--fig", "iwd", "--model.scale_options.placement_at", "{lm_head: dp"], "is not valid YAML"),
    (["--fig", "iwd", "--no_train", "--out", "nowhere"], "nowhere has no run of these figures"),
    (["--dry-run", "--json"], "--json"),
    (["--dry-run", "--slurm"], "--dry_run"),
]


@pytest.mark.parametrize(("words", "message"), thinned(WRONG, WRONG[::2], several=True))
def test_paper_command_wrong_arguments_refused(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_paper(words)
