"""conf/ without training: runs of the figures under all budgets, shared runs, errors; the paper's
configurations."""

import json
import subprocess
from pathlib import Path

import pytest

from lightning_sv.experiments.evaluate import evaluate
from lightning_sv.experiments.plan import plan_figure
from lightning_sv.experiments.resolver import RunResolver
from lightning_sv.experiments.results import PlannedFigure
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
from lightning_sv.runs.job import Job, array_script
from lightning_sv.scale.strategy import ScaleStrategy
from lightning_sv.statistics.verdicts import NOT_TESTABLE
from tests.conftest import ROOT, config_args, thinned


@pytest.fixture(scope="module", params=thinned(["cpu", "cpu-long", "gpu", "paper"], []))
def planned(request: pytest.FixtureRequest) -> tuple[str, dict[str, PlannedFigure]]:
    conf = ROOT / "conf"
    budget = load_budget(request.param, conf)
    resolver = RunResolver(budget, {}, conf)
    names = budget.figures or figure_names(conf)
    return request.param, {name: plan_figure(load_figure(name, conf), resolver) for name in names}


def test_figures_and_budgets_load() -> None:
    figures = {name: load_figure(name) for name in figure_names()}
    budgets = {name: load_budget(name) for name in budget_names()}
    assert len(figures) > 20 and {
        name for budget in budgets.values() for name in budget.figures or ()
    } <= set(figures)


def test_plan_figure_all_budgets_fit_accepts_their_runs(
    planned: tuple[str, dict[str, PlannedFigure]],
) -> None:
    budget, figures = planned
    assert set(figures) <= set(figure_names()) and budget in budget_names()
    run_specs = {
        run_spec.identity: run_spec
        for figure in figures.values()
        for run_spec, _ in figure.requests()
    }
    assert len(run_specs) > 20
    for run_spec in run_specs.values():
        module, data, trainer = parse_run(list(run_spec.args), check_corpus=False)
        assert plan_steps(module, data, trainer) == run_spec.steps
        assert run_spec.tokens == run_spec.steps * data.tokens_per_step


def test_plan_figure_budgets_have_their_tokens_per_parameter(
    planned: tuple[str, dict[str, PlannedFigure]],
) -> None:
    budget, figures = planned
    per_param = {
        f.spec.name: [r.tokens_per_param for r, _ in f.requests()] for f in figures.values()
    }
    least = {"cpu": 6.5, "cpu-long": 26, "gpu": 20, "paper": 99.9}[
        budget
    ]  # steps are whole: 5% above, 3% below
    assert min(per_param["placement"] + per_param["iwd"] + per_param["necessity"]) >= least * 0.999
    assert max(per_param["dense-scaling"], default=0) <= least * 1.1  # equal at every size
    panels = [panel for f in figures.values() for panel in f.panels if panel.spec.kind != "grid"]
    pairs = {len(arm.seeds) for panel in panels for arm in panel.arms}
    assert min(pairs) >= 2 and (budget != "cpu-long" or max(pairs) == 6)


def test_array_script_tasks_have_their_arguments(
    planned: tuple[str, dict[str, PlannedFigure]], tmp_path: Path
) -> None:
    """`bash -n` accepts it, and the arguments of a task are those of its run."""
    budget, figures = planned
    chosen = figures["placement"].requests()
    jobs = [
        Job("t", ("x",), (*r.args, "--seed_everything", str(s)), tmp_path / r.key(s))
        for r, s in chosen
    ]
    text = array_script(jobs, f"paper-{budget}", load_budget(budget).sbatch)
    script = tmp_path / "slurm.sh"
    # print the arguments instead of running srun
    srun = (
        'exec srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "$PROGRAM" fit'
        ' "${args[@]}"'
    )
    script.write_text(text.replace(srun, 'printf "%s\\n" "${args[@]}"'))
    subprocess.run(["bash", "-n", str(script)], check=True)
    for i in (0, len(jobs) - 1):
        env = {"SLURM_ARRAY_TASK_ID": str(i), "PATH": "/usr/bin:/bin"}
        said = subprocess.run(
            ["bash", str(script)], env=env, capture_output=True, text=True, check=True
        ).stdout
        assert said.splitlines() == [
            *jobs[i].arguments,
            "--run_dir",
            str(jobs[i].run_dir),
            "--ckpt_path",
            "last",
        ]
    assert f"#SBATCH --array=0-{len(jobs) - 1}\n" in text and "#SBATCH --signal=SIGUSR1@120" in text
    wrong = subprocess.run(
        ["bash", str(script)], env={"SLURM_ARRAY_TASK_ID": "999"}, capture_output=True, check=False
    )
    assert wrong.returncode == 2
    assert ("--gpus-per-node=8" in text) == (budget == "paper")


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
    ((verdict,),) = (found.verdicts for found in evaluate([figure], RunStore(tmp_path, None)))
    assert verdict.verdict == NOT_TESTABLE and reason in verdict.sentence


def test_plan_figure_one_pair_for_a_claim_refused(conf: Path) -> None:
    one = FIGURE.replace("title: p", "title: p\n  seeds: {cpu: 1}")
    with pytest.raises(ValueError, match=r"mine: panel 'p': seeds under budget cpu is 1"):
        plan_mine(conf, one + CLAIM % "less")
    assert len(plan_mine(conf, one).requests()) == 2  # it has no claim


def test_plan_figure_cross_varies_one_setting_at_a_time(conf: Path) -> None:
    """Through the first values of the others."""
    axes = (
        "axes: {model.optim.lr: {cpu: [2, 1, 4]}, model.backbone.init_std: {cpu: [0.02, 0.03,"
        " 0.01]}}"
    )
    (panel,) = plan_mine(conf, of_panel(f"kind: grid\n  one_at_a_time: [cpu]\n  {axes}")).panels
    first = panel.arms[0].series
    points = [arm.point for arm in panel.arms if arm.series == first]
    assert (
        sorted(points) == [(1, 0.02), (2, 0.01), (2, 0.02), (2, 0.03), (4, 0.02)]
        and len(panel.arms) == 10
    )


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
WRONG = [
    (of_arm("longer: 2.0"), r"arms\.b\.scale"),
    (of_arm("scale: hg, longr: 2.0"), r"longr: Key 'longr' not in .* mean.*: 'longer'"),
    (of_panel("kind: pie"), "'pie'"),
    (FIGURE.replace("    b:", "    a:"), r"mine\.yaml"),
    (
        of_panel("kind: grid\n  axes: {model.optim.lr: {cpu: [0.00123456781, 0.00123456782]}}"),
        "'a, lr 0.00123457'",
    ),
    (of_panel("seeds: 3"), r"seeds: Cannot assign int to Dict"),
    ("- a\n", "mine.yaml"),
    (of_panel("", "kind: les, a: a, b: b"), "'les'"),
    (of_panel("", "kind: less, a: a, b: c"), "'less'"),
    (of_panel("", "kind: less, a: a, b: a"), "'less'"),
    (of_panel("", "kind: leads, a: a, b: b, margin: 0.1"), "margin of a claim 'leads' is 0.1"),
    (of_panel("", "kind: widens, a: a, b: b, at: 2.5"), "at is 2.5; expected a share"),
    (
        of_panel("", "kind: less, a: a, b: b, skip_under: {gpuu: x}"),
        "'less': skip_under: budget 'gpuu' is unknown",
    ),
    (
        of_panel("", "kind: widens, a: a, b: b, at: 0.5, until: 0.5"),
        "at is 0.5; expected less than until",
    ),
    (of_panel("axes: {model.optim.lr: {cpu: [1]}}"), "axes is set and kind is 'curves'"),
    (of_panel("models: [dense, dense-1]"), "models is set and kind is 'curves'"),
    (of_panel(GRID % "cpu").replace("hg}", "hg, model: moe}"), "model of arm 'b'"),
    (of_panel(GRID % "mne"), "optim.lr: budget 'mne' is unknown"),
    (of_panel("", "kind: slope, a: a, b: b"), "'slope'"),
    (of_panel("kind: qkv", "kind: apart, a: a, tags: [q, k]"), "'apart'"),
    (of_panel("kind: table", "kind: cost, a: a, b: b"), "'cost' needs a margin above 0"),
    (of_panel("kind: scalar"), "p': tag is '' and kind is 'scalar'; expected a tag"),
    (of_panel("probes: sharpnes"), r"sharpnes"),
    (
        of_arm("scale: hg, axes: {model.optim.lr: {cpu: [1, 2]}}"),
        "axes of arm 'b' is model.optim.lr",
    ),
    (of_arm("scale: hg, skip_under: {cup: x}"), "arm 'b': skip_under: budget 'cup' is unknown"),
    (TWO_BASELINES, "`baseline: true` is set for a and b; expected one arm"),
    (of_panel("kind: lengths"), "`baseline: true` is set for no arm; expected one arm"),
    (of_panel("model: dnse"), "'dnse'"),
    (
        of_arm("scale: hg, longer: 2.0, overrides: {trainer.max_steps: 9}"),
        "longer of arm 'b' is 2; expected none",
    ),
    (of_arm("scale: hg, lr: {cpu: 0.1}, overrides: {model.optim.lr: 0.2}"), "lr of arm 'b' is set"),
    (of_panel(f"lr: {{cpu: 0.1}}\n  {GRID % 'cpu'}"), "lr of arm 'a' is set"),
    (
        of_arm("scale: hg, overrides: {model.tokens_per_param: 9}"),
        "model.tokens_per_param of arm 'b' is set",
    ),
    (
        of_panel(GRID.replace("model.optim.lr", "trainer.max_steps") % "cpu"),
        "axes has trainer.max_steps",
    ),
    (
        of_panel(GRID.replace("[1]", "[0, 1]") % "cpu"),
        "axis model.optim.lr is .0, 1.; expected different positive",
    ),
    (
        of_panel(GRID.replace("[1]", "[1, 2, 1]") % "cpu"),
        "axis model.optim.lr is .1, 2, 1.; expected different",
    ),
    (
        of_panel(
            "kind: grid\n  axes: {model.optim.weight_decay: {cpu: [1]}}",
            "kind: sensitivity, a: a, b: b",
        ),
        "'sensitivity'",
    ),
    (of_arm("scale: hgg"), r"hgg"),
    (of_arm("scale: bp+iwd"), r"'a' and 'b' resolve to the same configuration"),
    (of_arm("scale: hg, overrides: {model.optim.lrr: 1}"), r"lrr"),
    (
        of_arm("scale: hg, overrides: {model.optim: {beta1: 0.8}, model.optim.beta2: 0.9}"),
        r"--model\.optim is",
    ),
]


@pytest.mark.parametrize(("text", "message"), thinned(WRONG, WRONG[::3], several=True))
def test_plan_figure_wrong_yaml_refused_in_one_sentence(
    conf: Path, text: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        plan_mine(conf, text)
    assert "\n" not in str(error.value)


def test_plan_figure_steps_of_the_command_line_are_those_of_all_arms(conf: Path) -> None:
    (conf / "paper/mine.yaml").write_text(of_arm("scale: hg, overrides: {trainer.max_steps: 40}"))
    for extra, steps in (({}, [3000, 40]), ({"trainer.max_steps": 10}, [10, 10])):
        figure = plan_figure(
            load_figure("mine", conf), RunResolver(load_budget("cpu", conf), extra, conf)
        )
        assert [arm.run_spec.steps for arm in figure.panels[0].arms if arm.run_spec] == steps


def test_plan_figure_one_configuration_has_one_key(conf: Path) -> None:
    """With a value that the file also has, a different spelling of the strategy, or a different
    label."""
    spelled = (
        FIGURE.replace("scale: hg", "scale: unified")
        + "- title: q\n  arms:\n    c: {scale: iwd+or+dnp+hg, overrides: {model.backbone.init_std:"
        " 0.08, model.optim.lr: 0.006}}\n    d: {scale: unified, overrides:"
        " {model.backbone.init_std: 0.05}}\n    e: {scale: unified, longer: 1.5}\n"
    )
    figure = plan_mine(conf, spelled)
    b, c, d, e = (figure.panels[i].arms[j].run_spec for i, j in ((0, 1), (1, 0), (1, 1), (1, 2)))
    assert b.key(0) == c.key(0) and b.args == c.args
    assert len({b.key(0), b.key(1), d.key(0), e.key(0)}) == 4 and e.steps == 4500


def test_plan_figure_grid_of_whole_numbers(conf: Path) -> None:
    kind = "title: p\n  kind: grid\n  axes: {data.global_batch: {cpu: [2, 4]}}"
    (panel,) = plan_mine(conf, FIGURE.replace("title: p", kind)).panels
    batches = [json.loads(arm.run_spec.identity)["data"]["global_batch"] for arm in panel.arms]
    assert batches == [2, 4, 2, 4] and all(isinstance(batch, int) for batch in batches)


def test_plan_figure_null_is_a_value(conf: Path) -> None:
    (conf / "paper/mine.yaml").write_text(
        of_arm("scale: llama, overrides: {trainer.gradient_clip_val: null}")
    )
    figure = plan_figure(load_figure("mine", conf), RunResolver(load_budget("cpu", conf), {}, conf))
    clipped, free = (
        parse_run(list(arm.run_spec.args), check_corpus=False)[2]
        for arm in figure.panels[0].arms
        if arm.run_spec
    )
    assert clipped["gradient_clip_val"] == 1.0 and free["gradient_clip_val"] is None


def test_plan_figure_preset_with_placements_is_the_run_of_its_options(conf: Path) -> None:
    """So that a recorded run is found under either spelling."""
    keys = []
    for arm in (
        "scale: unified-head-dp",
        "scale: unified, overrides: {model.scale_options.placement_at.lm_head: dp}",
    ):
        (conf / "paper/mine.yaml").write_text(of_arm(arm))
        figure = plan_figure(
            load_figure("mine", conf), RunResolver(load_budget("cpu", conf), {}, conf)
        )
        run_specs = [arm.run_spec for arm in figure.panels[0].arms if arm.run_spec]
        keys.append([run_spec.key(0) for run_spec in run_specs])
    by_name, by_options = keys
    assert by_name == by_options


LR = "model.optim.lr"
ARMS = {
    "llama": 1.0,
    "hg+dnp+or+iwd": 2.0,
    "hg+dnp+or+iwd[lm_head=dp]": 3.0,
    "hg+dp+or": 4.0,
    "hg+dp+or[lm_head=dp]": 5.0,
}
TUNED = Tuned("tiny-1", "s", "adamw", "cos", 64, {name: {LR: lr} for name, lr in ARMS.items()})


@pytest.mark.parametrize(("scale", "exceptions", "of"), [
    ("unified", "", "hg+dnp+or+iwd"),
    ("unified", "[lm_head=dp]", "hg+dnp+or+iwd[lm_head=dp]"),
    ("unified", "[lm_head=dp,share_heads=k_proj+q_proj]", "hg+dnp+or+iwd[lm_head=dp]"),
    ("unified", "[share_heads=k_proj+q_proj]", "hg+dnp+or+iwd"),
    ("unified", "[lm_head=ap]", "hg+dnp+or+iwd"),
    ("hg+dnp", "[lm_head=dp]", "hg+dnp+or+iwd"),
    ("hg+ap", "", "hg+dp+or"),
    ("hg+iwd", "", "llama"),
])  # fmt: skip
def test_tuned_keys_untuned_arm_has_values_of_a_related_arm(
    scale: str, exceptions: str, of: str
) -> None:
    """That of the same strategy with most of its exceptions and no other; else by placement."""
    strategy = ScaleStrategy.parse(scale)
    label = f"{strategy}{exceptions}"
    values, note = tuned_keys(TUNED, strategy, label, 64)
    assert values == {LR: ARMS[of]}
    assert note == (
        "" if of == label else f"{label} is not tuned itself: it has the values of {of}."
    )


def test_tuned_keys_arm_without_related_arm_refused() -> None:
    with pytest.raises(ValueError, match="tiny-1.yaml"):
        tuned_keys(TUNED, ScaleStrategy.parse("nop"), "nop", 64)


# model, optimizer, schedule, strategy: learning rate, tokens per step, billions of tokens (None:
# 100 per parameter)
RECIPES = [
    ("llama-0.12b", "adamw", "cos", "llama", 4e-3, 1024, None),  # Table 4
    ("llama-0.12b", "adamw", "cos", "unified", 4e-3, 1024, None),
    ("llama-0.12b", "adamw", "cos", "nop", 2e-3, 1024, None),  # Appendix B.2.1
    ("llama-0.12b-large", "adamw", "cos", "llama", 4e-3, 1024, None),  # Appendix B.1.3
    ("llama-0.25b", "adamw", "cos", "unified", 2e-3, 1024, None),
    ("llama-0.5b", "adamw", "cos", "unified", 2e-3, 4096, None),
    ("llama-0.75b", "adamw", "cos", "unified", 2e-3, 4096, None),
    ("llama-1b", "adamw", "cos", "unified", 1e-3, 4096, None),
    ("moe-0.25b", "adamw", "cos", "unified", 3e-3, 1024, None),  # Table 5
    ("moe-0.5b", "adamw", "cos", "unified", 2e-3, 1024, None),
    ("moe-0.8b", "adamw", "cos", "unified", 2e-3, 4096, None),
    ("moe-1b", "adamw", "cos", "unified", 1e-3, 4096, None),
    ("moe-2b", "adamw", "cos", "unified", 6e-4, 4096, None),
    ("llama-0.12b", "muon", "cos", "unified", 5e-3, 1024, None),  # Appendix B.1.2
    ("moe-0.5b", "muon", "cos", "unified", 4e-3, 1024, None),
    ("llama-0.12b", "adamw", "wsd", "unified", 3e-3, 1024, None),
    ("moe-0.5b", "adamw", "wsd", "unified", 2e-3, 1024, None),
    ("gemma-0.5b", "muon", "cos", "wd", 4e-3, 4096, 10),  # Appendix B.2.2
    ("gemma-0.5b", "muon", "cos", "nowd", 4e-3, 4096, 10),
]


@pytest.mark.parametrize(
    ("model", "optim", "schedule", "scale", "lr", "seq_len", "billions"),
    thinned(RECIPES, RECIPES[1:3] + RECIPES[4:17:3] + RECIPES[-2:], several=True),
)
def test_recipe_of_the_paper_is_parsed(
    model: str,
    optim: str,
    schedule: str,
    scale: str,
    lr: float,
    seq_len: int,
    billions: float | None,
) -> None:
    layers = (
        "base",
        f"optim/{optim}",
        f"schedule/{schedule}",
        "trainer/gpu",
        "data/fineweb-edu",
        f"model/{model}",
    )
    module, data, trainer = parse_run(
        [*config_args(*layers), "--model.scale", scale], check_corpus=False
    )
    assert (module.plan.lr, data.seq_len, data.global_batch) == (lr, seq_len, 480)
    optimizer = module.optim
    assert (optimizer.beta1, optimizer.beta2, optimizer.weight_decay, optimizer.muon_momentum) == (
        0.9,
        0.95,
        0.1,
        0.95,
    )
    assert module.schedule.final == {"cos": 0.05, "wsd": 0.0}[schedule]
    if billions is None:
        assert trainer.get("max_steps", -1) == -1
        tokens = module.plan.steps_for_budget(data.tokens_per_step) * data.tokens_per_step
        assert tokens == pytest.approx(100 * module.plan.n_activated, rel=1e-3)
    else:
        assert trainer["max_steps"] * data.tokens_per_step == pytest.approx(
            billions * 1e9, rel=0.02
        )
