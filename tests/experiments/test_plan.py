"""conf/ without training: runs of the figures under all budgets, shared runs, errors; the paper's
configurations."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_sv.cli.paper_runs import TimeEstimate
from lightning_sv.errors import ConfigError
from lightning_sv.experiments.evaluate import evaluate
from lightning_sv.experiments.plan import plan_figure
from lightning_sv.experiments.preflight import check_corpora
from lightning_sv.experiments.resolver import RunResolver
from lightning_sv.experiments.results import PlannedFigure
from lightning_sv.experiments.run_spec import RunSpec
from lightning_sv.experiments.run_store import RunStore
from lightning_sv.experiments.spec import (
    Tuned,
    budget_names,
    figure_names,
    load_budget,
    load_figure,
)
from lightning_sv.experiments.tuned_values import tuned_keys
from lightning_sv.lit.run_arguments import parse_run
from lightning_sv.plan.plan import plan_steps
from lightning_sv.runs.directory import config_value
from lightning_sv.runs.job import Job
from lightning_sv.runs.slurm import array_script
from lightning_sv.scale.strategy import ScaleStrategy
from lightning_sv.statistics.verdicts import NOT_TESTABLE
from tests.conftest import ROOT, config_args, thinned

Planned = tuple[str, dict[str, PlannedFigure]]
#: budget -> least tokens per parameter of its figures; steps are whole numbers
LEAST = {"cpu": 6.5, "cpu-long": 26, "gpu": 20, "paper": 99.9}


# strategies of some figures are the same model, which a run of the user warns about
pytestmark = pytest.mark.filterwarnings("ignore:scale strategy .* is the same model")


@pytest.fixture(scope="module", params=thinned(LEAST, []))
def planned(request: pytest.FixtureRequest) -> Planned:
    conf = ROOT / "conf"
    budget = load_budget(request.param, conf)
    resolver = RunResolver(budget, {}, conf)
    names = budget.figures or figure_names(conf)
    return request.param, {name: plan_figure(load_figure(name, conf), resolver) for name in names}


def test_figures_and_budgets_load() -> None:
    figures = {name: load_figure(name) for name in figure_names()}
    assert len(figures) > 20
    for name in budget_names():
        assert set(load_budget(name).figures) <= set(figures)


def test_plan_figure_all_budgets_fit_accepts_their_runs(planned: Planned) -> None:
    run_specs: dict[str, RunSpec] = {}
    for figure in planned[1].values():
        run_specs |= {run_spec.identity: run_spec for run_spec, _ in figure.requests()}
    assert len(run_specs) > 20
    for run_spec in run_specs.values():
        module, data, trainer = parse_run(list(run_spec.args), check_corpus=False)
        assert plan_steps(module, data, trainer) == run_spec.steps
        assert run_spec.tokens == run_spec.steps * data.tokens_per_step


def ratios(figure: PlannedFigure) -> list[float]:
    """Return the tokens per parameter of the runs of a figure."""
    return [run_spec.tokens_per_param for run_spec, _ in figure.requests()]


def test_plan_figure_budgets_have_their_tokens_per_parameter(planned: Planned) -> None:
    budget, figures = planned
    for name in ("placement", "iwd", "necessity"):
        assert min(ratios(figures[name])) >= LEAST[budget] * 0.999
    assert max(ratios(figures["dense-scaling"])) <= LEAST[budget] * 1.1  # at every size
    pairs = set()
    for figure in figures.values():
        for panel in figure.panels:
            if panel.spec.kind != "grid":
                pairs |= {len(arm.seeds) for arm in panel.arms}
    assert min(pairs) >= 2


def test_array_script_tasks_have_their_arguments(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    jobs = []
    for number, scale in enumerate(("hg+dp", "'$HOME \"*")):
        jobs.append(Job("t", ("x",), ("--model.scale", scale), tmp_path / f"run {number}"))
    text = array_script(jobs, "paper", ["--gpus-per-node=8"])

    def task(number: int) -> subprocess.CompletedProcess[str]:
        env = {"SLURM_ARRAY_TASK_ID": str(number), "PATH": f"{tmp_path}:/usr/bin:/bin"}
        return subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True)

    for number, job in enumerate(jobs):
        _, arguments = task(number).stdout.split("\nfit\n")
        assert arguments.splitlines() == [*job.arguments, *job.here]
    assert task(2).returncode == 2
    assert "#SBATCH --array=0-1\n#SBATCH --gpus-per-node=8\n" in text


@pytest.mark.parametrize(("name", "expected"), [("cpu", 60), ("gpu", 60 / 3600)])
def test_time_of_a_run_has_its_startup_in_the_unit_of_the_budget(
    name: str, expected: float
) -> None:
    times = []
    for seconds in (0.0, 60.0):
        budget = replace(load_budget(name), startup_seconds=seconds)
        figure = plan_figure(load_figure("necessity"), RunResolver(budget, {}))
        times.append(TimeEstimate(budget, parallel=1).cost(figure.requests()[:1]))
    assert times[1] - times[0] == pytest.approx(expected)


FIGURE = (
    "title: t\nsection: s\nsummary: s\npanels:\n- title: p\n  arms:\n    a: {scale: llama}\n    b:"
    " {scale: hg}\n"
)
CLAIM = "  claims: [{kind: %s, a: b, b: a, margin: 0.01, paper: x}]\n"


def plan_mine(conf: Path, text: str = "") -> PlannedFigure:
    """Plan the figure `mine` of `conf`, after writing `text` to its file."""
    if text:
        (conf / "paper/mine.yaml").write_text(text)
    return plan_figure(load_figure("mine", conf), RunResolver(load_budget("cpu", conf), {}, conf))


@pytest.mark.parametrize(("key", "reason"), [
    ("skip_under: {cpu: it needs longer runs}", "it needs longer runs"),
    ("model: dense-large", "one size is trained"),
])  # fmt: skip
def test_plan_figure_untrained_arm_has_a_reason(
    conf: Path, tmp_path: Path, key: str, reason: str
) -> None:
    with (conf / "paper/budgets/cpu.yaml").open("a") as file:
        file.write("unavailable: {dense-large: one size is trained}\n")
    figure = plan_mine(conf, FIGURE.replace("scale: hg", f"scale: hg, {key}") + CLAIM % "less")
    assert [arm.label for arm in figure.panels[0].arms] == ["a"]
    (found,) = evaluate([figure], RunStore(tmp_path, None))
    (verdict,) = found.verdicts
    assert verdict.verdict == NOT_TESTABLE and reason in verdict.sentence


def test_plan_figure_without_a_trained_arm_has_their_reason(conf: Path) -> None:
    skipped = FIGURE.replace("scale: llama", "scale: llama, skip_under: {cpu: too long}")
    figure = plan_mine(conf, skipped.replace("scale: hg", "scale: hg, skip_under: {cpu: too wide}"))
    (panel,) = figure.panels
    assert panel.arms == () and panel.why_not == "too long"


def of_arm(keys: str) -> str:
    return FIGURE.replace("scale: hg", keys)


def of_panel(keys: str, claim: str = "") -> str:
    """Return a figure with more keys of its panel, and with a claim."""
    claims = f"  claims: [{{{claim}, paper: x}}]\n" if claim else ""
    return FIGURE.replace("title: p", f"title: p\n  {keys}") + claims


TWO_BASELINES = FIGURE.replace("llama}", "llama, baseline: true}").replace(
    "hg}", "hg, baseline: true}"
)
GRID = "kind: grid\n  axes: {model.optim.lr: {%s: [1]}}"
LR_AXIS = "model.optim.lr"
OTHER_BUDGET = of_panel("kind: grid\n  axes: {model.optim.lr: {}}").replace(
    "hg}", "hg, axes: {model.optim.lr: {cpu: [1]}}}"
)
#: an error in a figure -> words of its key, kind or arm
WRONG = [
    (of_arm("longer: 2.0"), r"arms\.b\.scale"),
    (of_arm("scale: hg, longr: 2.0"), "longr"),
    (of_panel("kind: pie"), "'pie'"),
    (FIGURE.replace("    b:", "    a:"), r"mine\.yaml"),
    (of_panel("kind: grid\n  axes: {model.optim.lr: {cpu: [1.0000001, 1.0000002]}}"), "'a, lr 1'"),
    (of_panel("seeds: 3"), "seeds"),
    ("- a\n", r"mine\.yaml"),
    (of_panel("", "kind: les, a: a, b: b"), "'les'"),
    (of_panel("", "kind: less, a: a, b: c"), "'less': arm 'c'"),
    (of_panel("", "kind: less, a: a, b: a"), "'less'"),
    (of_panel("", "kind: leads, a: a, b: b, margin: 0.1"), "margin of a claim 'leads'"),
    (of_panel("", "kind: widens, a: a, b: b, at: 2.5"), "at is 2.5"),
    (of_panel("", "kind: widens, a: a, b: b, at: 0.5, until: 0.5"), "at is 0.5"),
    (of_panel("", "kind: less, a: a, b: b, skip_under: {gpuu: x}"), "'gpuu'"),
    (of_arm("scale: hg, skip_under: {cup: x}"), "'cup'"),
    (of_panel("models: [dense, dense-1]"), "models is .*'curves'"),
    (of_panel(GRID % "cpu").replace("hg}", "hg, model: moe}"), "model of arm 'b'"),
    (of_panel(GRID % "mne"), "'mne'"),
    (of_panel("", "kind: slope, a: a, b: b"), "'slope'"),
    (of_panel("kind: qkv", "kind: apart, a: a, tags: [q], margin: 0.1"), "'apart'"),
    (of_panel("kind: table", "kind: cost, a: a, b: b"), "margin of a claim 'cost'"),
    (of_panel("kind: scalar"), "tag"),
    (of_panel("probes: sharpnes"), "sharpnes"),
    (of_arm("scale: hg, axes: {model.optim.lr: {cpu: [1]}}"), "axes of arm 'b'"),
    (OTHER_BUDGET, "axes of arm 'b' is model.optim.lr"),
    (TWO_BASELINES, "baseline.*a and b"),
    (FIGURE.partition("  arms:")[0] + "  arms: {}\n", "arms"),
    (of_arm("scale: hg, overrides: {seed_everything: 5}"), "--seed_everything is 5"),
    (of_arm("scale: hg, overrides: {data.seq_len: 32}"), "data.seq_len of b"),
    (of_panel("kind: lengths"), "baseline"),
    (of_panel("model: dnse"), "'dnse'"),
    (of_arm("scale: hg, overrides: {trainer.max_steps: 9}"), "trainer.max_steps of arm 'b'"),
    (of_panel(f"lr: {{cpu: 0.1}}\n  {GRID % 'cpu'}"), "lr of arm 'a'"),
    (of_arm("scale: hg, overrides: {model.tokens_per_param: 9}"), "tokens_per_param of arm 'b'"),
    (of_panel(GRID.replace(LR_AXIS, "trainer.max_steps") % "cpu"), "axes has trainer.max_steps"),
    (of_panel(GRID.replace("[1]", "[0, 1]") % "cpu"), "axis model.optim.lr"),
    (of_panel(GRID.replace("[1]", "[1, 2, 1]") % "cpu"), "axis model.optim.lr"),
    (of_panel(GRID.replace(LR_AXIS, "x") % "cpu", "kind: sensitivity, a: a, b: b"), "'sensitivity'"),
    (of_arm("scale: hgg"), "hgg"),
    (of_arm("scale: bp+iwd"), "'a' and 'b'"),
    (of_arm("scale: hg, overrides: {model.optim.lrr: 1}"), "lrr"),
    (of_arm("scale: hg, overrides: {model.optim: {beta1: 0.8}, model.optim.beta2: 0.9}"), "--model.optim is"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), thinned(WRONG, WRONG[::3], several=True))
def test_plan_figure_wrong_yaml_refused_in_one_sentence(
    conf: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        plan_mine(conf, text)
    assert "\n" not in str(error.value)


def test_check_corpora_runs_of_two_corpora_refused(conf: Path, corpus: Path) -> None:
    """A run's record has the corpus of the first one; reports compare losses of one corpus."""
    own = "scale: hg, overrides: {data.corpus.dir: data/other}"
    text = of_panel(f"overrides: {{data.corpus.dir: {corpus}}}").replace("scale: hg", own)
    with pytest.raises(ConfigError, match="data/other; expected"):
        check_corpora([plan_mine(conf, text)])


@pytest.mark.parametrize(("keys", "points"), [
    ("axes: {model.optim.lr: {cpu: [0.2, 0.1]}, model.backbone.init_std: {other: [3, 4]}}", [(0.2,), (0.1,)]),
    ("axes: {data.global_batch: {cpu: [2, 4]}}", [(2,), (4,)]),
    ("one_at_a_time: [cpu]\n  axes: {model.optim.lr: {cpu: [0.2, 0.1]}, data.global_batch: {cpu: [4, 2, 8]}}", [(0.2, 4), (0.2, 2), (0.2, 8), (0.1, 4)]),
])  # fmt: skip
def test_plan_figure_grid_has_the_points_of_its_budget(
    conf: Path, keys: str, points: list[tuple[float, ...]]
) -> None:
    """Verdicts, pictures and tuned values read one value per axis; whole numbers stay whole."""
    (conf / "paper/budgets/other.yaml").symlink_to(conf / "paper/budgets/cpu.yaml")
    (panel,) = plan_mine(conf, of_panel(f"kind: grid\n  {keys}")).panels
    for series in ("a", "b"):
        arms = [arm for arm in panel.arms if arm.series == series]
        found = []
        for arm in arms:
            settings = arm.run_spec.settings
            found.append(tuple(config_value(settings, key) for key in panel.spec.axes))
        assert [arm.point for arm in arms] == points and repr(found) == repr(points)


def run_specs_of(figure: PlannedFigure) -> list[RunSpec]:
    specs = []
    for panel in figure.panels:
        specs += [arm.run_spec for arm in panel.arms]
    return specs


SPELLINGS = """- title: q
  arms:
    c: {scale: iwd+or+dnp+hg, overrides: {model.backbone.init_std: 0.08, model.optim.lr: 0.006}}
    d: {scale: unified, overrides: {model.backbone.init_std: 0.05}}
    e: {scale: unified, longer: 1.5}
    f: {scale: unified-head-dp}
- title: r
  arms:
    g: {scale: unified, overrides: {model.scale_options.placement_at.lm_head: dp}}
"""


def test_plan_figure_one_configuration_has_one_key(conf: Path) -> None:
    """With a value that the file also has, or a different spelling of strategy or preset."""
    _, b, c, d, e, f, g = run_specs_of(plan_mine(conf, of_arm("scale: unified") + SPELLINGS))
    assert b.run_name(0) == c.run_name(0) and b.args == c.args
    assert f.run_name(0) == g.run_name(0)
    assert len({b.run_name(0), b.run_name(1), d.run_name(0), e.run_name(0), f.run_name(0)}) == 5
    assert e.steps == 4500


def test_plan_figure_null_is_a_value(conf: Path) -> None:
    figure = plan_mine(conf, of_arm("scale: llama, overrides: {trainer.gradient_clip_val: null}"))
    clipping = []
    for run_spec in run_specs_of(figure):
        _, _, trainer = parse_run(list(run_spec.args), check_corpus=False)
        clipping.append(trainer["gradient_clip_val"])
    assert clipping == [1.0, None]


LR = "model.optim.lr"
ARMS = {
    "llama": 1.0,
    "hg+dnp+or+iwd": 2.0,
    "hg+dnp+or+iwd[lm_head=dp]": 3.0,
    "hg+dp+or": 4.0,
    "hg+dp+or[lm_head=dp]": 5.0,
}
SAME_AS = {"hg+dnp+or+iwd[lm_head=np]": "hg+dp+or"}
TUNED = Tuned(
    "tiny-1", "s", "adamw", "cos", 64, {name: {LR: lr} for name, lr in ARMS.items()}, SAME_AS
)


@pytest.mark.parametrize(("scale", "exceptions", "of"), [
    ("unified", "", "hg+dnp+or+iwd"),
    ("unified", "[lm_head=dp]", "hg+dnp+or+iwd[lm_head=dp]"),
    ("unified", "[lm_head=ap]", "hg+dnp+or+iwd"),
    ("unified", "[lm_head=np]", "hg+dp+or"),
    ("hg+dnp", "", "hg+dnp+or+iwd"),
    ("hg+ap", "", "hg+dp+or"),
    ("hg+iwd", "", "llama"),
])  # fmt: skip
def test_tuned_keys_untuned_arm_has_values_of_its_placement_or_of_a_named_arm(
    scale: str, exceptions: str, of: str
) -> None:
    strategy = ScaleStrategy.parse(scale)
    label = f"{strategy}{exceptions}"
    values, note = tuned_keys(TUNED, strategy, label, 64)
    assert values == {LR: ARMS[of]}
    assert (note == "") == (of == label) and of in (note or label)


def test_tuned_keys_arm_without_tuned_placement_refused() -> None:
    with pytest.raises(ValueError, match="tiny-1.yaml"):
        tuned_keys(TUNED, ScaleStrategy.parse("nop"), "nop", 64)


#: model, optimizer, schedule, strategy, learning rate, tokens per sequence, billions of tokens
#: (0: 100 per parameter)
RECIPES = [
    ("llama-0.12b", "adamw", "cos", "llama", 4e-3, 1024, 0),  # Table 4
    ("llama-0.12b", "adamw", "cos", "unified", 4e-3, 1024, 0),
    ("llama-0.12b", "adamw", "cos", "nop", 2e-3, 1024, 0),  # Appendix B.2.1
    ("llama-0.12b-large", "adamw", "cos", "llama", 4e-3, 1024, 0),  # Appendix B.1.3
    ("llama-0.25b", "adamw", "cos", "unified", 2e-3, 1024, 0),
    ("llama-0.5b", "adamw", "cos", "unified", 2e-3, 4096, 0),
    ("llama-0.75b", "adamw", "cos", "unified", 2e-3, 4096, 0),
    ("llama-1b", "adamw", "cos", "unified", 1e-3, 4096, 0),
    ("moe-0.25b", "adamw", "cos", "unified", 3e-3, 1024, 0),  # Table 5
    ("moe-0.5b", "adamw", "cos", "unified", 2e-3, 1024, 0),
    ("moe-0.8b", "adamw", "cos", "unified", 2e-3, 4096, 0),
    ("moe-1b", "adamw", "cos", "unified", 1e-3, 4096, 0),
    ("moe-2b", "adamw", "cos", "unified", 6e-4, 4096, 0),
    ("llama-0.12b", "muon", "cos", "unified", 5e-3, 1024, 0),  # Appendix B.1.2
    ("moe-0.5b", "muon", "cos", "unified", 4e-3, 1024, 0),
    ("llama-0.12b", "adamw", "wsd", "unified", 3e-3, 1024, 0),
    ("moe-0.5b", "adamw", "wsd", "unified", 2e-3, 1024, 0),
    ("gemma-0.5b", "muon", "cos", "wd", 4e-3, 4096, 10),  # Appendix B.2.2
    ("gemma-0.5b", "muon", "cos", "nowd", 4e-3, 4096, 10),
]


@pytest.mark.parametrize("recipe", thinned(RECIPES, RECIPES[1:3] + RECIPES[4:17:3] + RECIPES[-2:]))
def test_recipe_of_the_paper_is_parsed(
    recipe: tuple[str, str, str, str, float, int, int],
) -> None:
    model, optim, schedule, scale, lr, seq_len, billions = recipe
    files = config_args(
        "base",
        f"optim/{optim}",
        f"schedule/{schedule}",
        "trainer/gpu",
        "data/fineweb-edu",
        f"model/{model}",
    )
    module, data, trainer = parse_run([*files, "--model.scale", scale], check_corpus=False)
    assert (module.plan.lr, data.seq_len, data.global_batch) == (lr, seq_len, 480)
    optimizer = module.optim
    assert (optimizer.beta1, optimizer.beta2) == (0.9, 0.95)
    assert (optimizer.weight_decay, optimizer.muon_momentum) == (0.1, 0.95)
    assert module.schedule.final == {"cos": 0.05, "wsd": 0.0}[schedule]
    tokens = plan_steps(module, data, trainer) * data.tokens_per_step
    expected = billions * 1e9 or 100 * module.plan.n_activated
    assert tokens == pytest.approx(expected, rel=0.02 if billions else 1e-3)
