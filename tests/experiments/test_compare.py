"""Comparisons end to end with fake training whose losses are known, and the arguments of
`lightning-sv compare`."""

import io
import json
import math
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from lightning_sv.cli import compare as command
from lightning_sv.errors import RunError
from lightning_sv.experiments.compare import compare, print_comparison
from lightning_sv.experiments.kinds.curves import TOKEN_FACTOR
from lightning_sv.experiments.plan import plan_figure
from lightning_sv.experiments.report.results_csv import run_frame, write_csv
from lightning_sv.experiments.report.scalar_plots import scalar_plots
from lightning_sv.experiments.resolver import RunResolver
from lightning_sv.experiments.results import Figure, PlannedFigure
from lightning_sv.experiments.run_store import RunStore
from lightning_sv.experiments.sources.from_cli import compared_figure, parse_arm, request_arms
from lightning_sv.experiments.sources.from_runs import own_figure
from lightning_sv.experiments.spec import ArmSpec, load_budget, load_figure
from lightning_sv.lit.run_arguments import parse_run
from lightning_sv.lit.summary import has_baseline, print_summary
from tests.conftest import CONFIG, Refused, listen_to_interrupts, thinned

FAKE = (sys.executable, str(Path(__file__).with_name("fake_fit.py")))
LLAMA, UNIFIED = parse_arm("llama"), parse_arm("unified")
Asked = tuple[str, ArmSpec]


def compared(arms: Sequence[Asked], words: Sequence[str], seeds: int) -> PlannedFigure:
    return compared_figure(request_arms(arms, words, {}), seeds)


def run(
    out: Path,
    *fake: str,
    words: Sequence[str] = CONFIG,
    seeds: int = 3,
    arms: Sequence[Asked] = (LLAMA, UNIFIED),
) -> tuple[dict[str, Any], str]:
    """Return comparison.json and the output; `fake` are more arguments of the fake training."""
    said = Console(file=io.StringIO(), width=400)
    runs = RunStore(out, launcher=(*FAKE, *fake))
    print_comparison(
        said, compare(compared(arms, words, seeds), runs, out, jobs=2, console=said), out
    )
    return numbers(out), said.file.getvalue()  # type: ignore[attr-defined]


def numbers(out: Path) -> dict[str, Any]:
    return json.loads((out / "comparison.json").read_text())


def run_dir(out: Path, strategy: str, seed: int) -> Path:
    """Return the directory of a run of `tiny`, whose name ends with a hash."""
    (found,) = (out / "runs").glob(f"tiny-{strategy}-seed{seed}-*")
    return found


def test_run_key_has_the_content_of_initial_weights(tmp_path: Path) -> None:
    def keys(start: Path) -> set[str]:
        figure = compared((LLAMA, UNIFIED), [*CONFIG, "--model.init_from", str(start)], 1)
        return {run_spec.key(seed) for run_spec, seed in figure.requests()}

    one, same, other = (
        tmp_path / "one.ckpt",
        tmp_path / "same/checkpoints/last.ckpt",
        tmp_path / "other.ckpt",
    )
    same.parent.mkdir(parents=True)
    for path, content in ((one, b"weights"), (same, b"weights"), (other, b"others")):
        path.write_bytes(content)
    assert keys(one) == keys(tmp_path / "same") and not keys(one) & keys(other)
    with pytest.raises(ValueError, match=r"model\.init_from"):
        keys(tmp_path / "absent")


@pytest.fixture(autouse=True)
def _no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip reports, which take most of the time; `three` is created before and has one."""
    monkeypatch.setattr(
        "lightning_sv.experiments.compare.write_report", lambda *given, **named: None
    )


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three pairs with differences -0.02, -0.04, -0.03."""
    run(out := tmp_path_factory.mktemp("three"))
    return out


def test_compare_numbers_equal_the_hand_computation(three: Path) -> None:
    """mean -0.03, se 0.01 / sqrt(3), t(0.975, 2) = 4.3027: interval -0.0548 to -0.0052."""
    figures = numbers(three)
    (found,) = figures["differences"]
    assert found["b"] == "unified" and found["difference"]["verdict"] == "B lower"
    sentence = (
        "unified is lower than llama by 0.030 nats per token (95% interval 0.005 to 0.055, 3"
        " pairs)."
    )
    assert found["sentence"] == sentence
    assert found["difference"]["mean"] == pytest.approx(-0.03, abs=1e-6)
    assert found["difference"]["low"] == pytest.approx(-0.03 - 4.302653 * 0.01 / 3**0.5, abs=1e-5)
    assert found["difference"]["per_seed"] == pytest.approx([-0.02, -0.04, -0.03], abs=1e-6)
    assert [arm["label"] for arm in figures["arms"]] == ["llama", "unified"]
    assert figures["arms"][0]["val_loss_per_seed"] == pytest.approx([3.0, 3.01, 3.02])
    # both gain 0.1 nats per 1,000 tokens, so B reaches the target 200, 400 and 300 tokens earlier
    tokens = found["tokens_to_higher_final_loss"]
    assert tokens["tokens_b"] == pytest.approx([9800, 9600, 9700], abs=0.1)
    assert tokens["factor"] == pytest.approx((1e12 / 9800 / 9600 / 9700) ** (1 / 3), rel=1e-5)
    assert (
        figures["warnings"] == []
    )  # neither about the shuffle seed nor about a path in the run directory
    assert len(figures["runs"]) == 6 and "--seed_everything 2" in figures["runs"][5]["command"]
    assert (three / "figures/comparison-1-difference.png").stat().st_size > 10_000


def test_compare_report_is_read_again(three: Path, tmp_path: Path) -> None:
    """The page has one table without empty columns and no words of claims; `report` finds the runs,
    also if moved."""
    (found,) = numbers(three)["differences"]
    page = (three / "report.md").read_text()
    assert (
        "## unified against llama" in page
        and f"{found['sentence']} {found['tokens_sentence']}" in page
    )
    assert not re.search("claim|contradicted|primary|Holm|corrected|verdict", page)
    assert set(re.findall(r"\d+%(?= interval)", page)) == {"95%"} and "90%" not in page
    tables = re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)
    assert len(tables) == 3  # source of the runs, results, and size of the steps
    head, _, *lines = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in tables[1].splitlines()
    )
    assert all(any(column) for column in zip(*lines, strict=True))
    assert [line[head.index("result")] for line in lines] == ["", "lower"]
    assert lines[1][head.index(TOKEN_FACTOR)].startswith(
        f"{found['tokens_to_higher_final_loss']['factor']:.2f} ("
    )
    moved = tmp_path / "moved"
    shutil.copytree(three, moved)
    again = own_figure([moved])
    (pair,) = again.panels[0].pairs
    assert (
        again.verdicts == ()
        and json.loads(json.dumps(pair.to_dict()["difference"])) == found["difference"]
    )
    assert all(run.dir.is_relative_to(moved) for arm in again.panels[0].arms for run in arm.runs)


@pytest.mark.long
def test_compare_several_arms_share_one_baseline(tmp_path: Path) -> None:
    deltas = ("--delta_of", "nop", "0.04,0.06,0.05", "--delta_of", "hg", "0.01,-0.02,0.00")
    two, _ = run(tmp_path, *deltas)
    four, said = run(tmp_path, *deltas, arms=(LLAMA, UNIFIED, parse_arm("nop"), parse_arm("hg")))
    runs = {each["name"]: each for each in four["runs"]}
    assert list(runs) == [f"{arm}-seed{seed}" for seed in range(3) for arm in "abcd"]
    assert said.count(": done in") == 6 and {each["dir"] for each in two["runs"]} < {
        r["dir"] for r in four["runs"]
    }
    assert "nop" in runs["c-seed1"]["command"] and "hg" in runs["d-seed1"]["command"]
    found = [pair["difference"] for pair in four["differences"]]
    assert [d["verdict"] for d in found] == ["B lower", "B higher", "not resolved"]
    assert (
        found[1]["per_seed"] == pytest.approx([0.04, 0.06, 0.05], abs=1e-6) and not four["warnings"]
    )
    alone = two["differences"][0]["difference"]
    assert (alone["mean"], alone["df"], alone["scatter"]) == (
        pytest.approx(found[0]["mean"]),
        2,
        "",
    )
    assert (found[0]["df"], found[0]["scatter"]) == (6, "scatter of 4 arms, 6 degrees of freedom")
    for pair in four["differences"]:
        assert pair["sentence"] in said and pair["tokens_sentence"] in said
        assert f"{pair['difference']['mean']:+.4f}" in said


def test_compare_complete_runs_reused_and_seeds_added(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("model: {optim: {weight_decay: 0.1}}\n")
    out, words = tmp_path / "cmp", [*CONFIG, "--config", str(config)]
    one, _ = run(out, words=words, seeds=1)
    assert one["differences"][0]["sentence"].startswith("Not resolved: one pair gives no interval")
    before = (run_dir(out, "llama", 0) / "summary.json").stat().st_mtime_ns
    two, said = run(out, words=words, seeds=2)
    assert "2 of 4 runs are complete" in said and "llama, seed 1: done" in said
    assert two["runs"][:2] == one["runs"]
    assert {arm.label for arm in own_figure([out]).panels[0].arms} == {"llama", "unified"}
    assert (run_dir(out, "llama", 0) / "summary.json").stat().st_mtime_ns == before
    config.write_text("# a word\nmodel: {optim: {weight_decay: 0.1}}\n")
    swapped = [parse_arm("iwd+or+dnp+hg", "", "the paper's"), parse_arm("nop"), LLAMA]
    _, said = run(out, words=[*words, "--model.optim.weight_decay=0.1"], seeds=1, arms=swapped)
    assert "2 of 3 runs are complete" in said and "nop, seed 0: done" in said
    assert run(out, words=[*words, "--model.optim.lr", "0.1"], seeds=1)[1].count(": done in") == 2
    config.write_text("model: {optim: {weight_decay: 0.2}}\n")
    assert run(out, words=words, seeds=1)[1].count(": done in") == 2


def test_compare_diverged_run_report_of_its_folder_is_equal(tmp_path: Path) -> None:
    arms = (LLAMA, UNIFIED, parse_arm("nop"))
    run(tmp_path, seeds=3, arms=arms)
    lost = run_dir(tmp_path, "nop", 0)
    (lost / "summary.json").unlink()
    (lost / "nonfinite.jsonl").write_text('{"step": 5}\n')
    found, _ = run(tmp_path, seeds=3, arms=arms)
    assert [pair["difference"]["seeds"] for pair in found["differences"]] == [[0, 1, 2], [1, 2]]
    assert len(found["runs"]) == 8 and any(
        "1 of 3 runs of nop diverged" in warning for warning in found["warnings"]
    )
    assert [arm["seeds"] for arm in found["arms"]] == [[0, 1, 2], [0, 1, 2], [1, 2]] and found[
        "seeds"
    ] == [1, 2]
    report = own_figure([tmp_path])
    assert "Diverged runs of nop, which are left out: 1." in report.warnings
    again = report.panels[0]
    pairs = [pair.to_dict()["difference"] for pair in again.pairs]
    assert pairs == [pair["difference"] for pair in found["differences"]]
    assert [arm.losses.tolist() for arm in again.arms] == [
        arm["val_loss_per_seed"] for arm in found["arms"]
    ]
    for seed in (1, 2):
        lost = run_dir(tmp_path, "nop", seed)
        (lost / "summary.json").unlink()
        (lost / "nonfinite.jsonl").write_text('{"step": 5}\n')
    found, _ = run(tmp_path, seeds=3, arms=arms)
    assert [pair["b"] for pair in found["differences"]] == ["unified"] and len(found["arms"]) == 2
    with pytest.raises(RunError, match="nop"):
        run(tmp_path, seeds=3, arms=(LLAMA, arms[2]))


def test_compare_run_keys_equal_those_of_a_figure() -> None:
    given = plan_figure(
        load_figure("protocol"), RunResolver(load_budget("cpu-100"), {"model.optim.lr": 0.05})
    )
    for spec, _ in given.requests():  # the user's key wins over the figure's rate
        assert spec.args[spec.args.index("--model.optim.lr") + 1] == "0.05"
    budget = load_budget("cpu")
    plain = {"dense": replace(budget.models["dense"], overrides={}, tuned="")}  # as in `compare`
    budget = replace(budget, overrides={}, seeds=3, first_seed=0, models=plain)
    figure = plan_figure(load_figure("heterogeneity"), RunResolver(budget, {}))
    planned = compared([LLAMA, parse_arm("hg"), parse_arm("hg+dp+or")], CONFIG, 3)
    assert {r.key(seed) for r, seed in planned.requests()} == {
        r.key(seed) for r, seed in figure.requests()
    }


def test_compare_failed_run_shows_its_log_and_is_repeated(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)seed 1 failed \(exit code 3\).*simulated failure"):
        run(tmp_path, "--fail_seed", "1", seeds=2)
    assert (run_dir(tmp_path, "hg+dnp+or+iwd", 0) / "summary.json").exists()
    with pytest.raises(RuntimeError, match="simulated failure"):
        run(tmp_path, "--fail_seed", "1", seeds=2)


def test_compare_different_corpora_refused_configs_warned(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="corpus_hash"):
        run(tmp_path / "corpus", "--corpus_of", "hg+dnp+or+iwd", "decaf", seeds=1)
    faster = parse_arm("unified", "--model.optim.lr 0.1", "unified")
    found, _ = run(tmp_path / "config", "--hidden.key", "differs", seeds=1, arms=(LLAMA, faster))
    assert found["warnings"] == [
        "The configs differ in hidden.key: llama against hg+dnp+or+iwd (a-seed0, b-seed0)."
    ]


def test_compare_wrong_requests_start_nothing(tmp_path: Path) -> None:
    def refused(*arms: Asked, match: str, words: Sequence[str] = CONFIG) -> None:
        with pytest.raises(ValueError, match=match):
            run(tmp_path, words=words, arms=arms)

    refused(LLAMA, LLAMA, match="'llama' is the name of two arms")
    refused(
        LLAMA,
        UNIFIED,
        parse_arm("hg+dnp+or+iwd", "", "again"),
        match="'unified' and 'again' resolve to the same",
    )
    refused(LLAMA, parse_arm("nop", "--seed_everything 3", "nop"), match="--seed_everything")
    with pytest.raises(ValueError, match="words of a shell"):
        parse_arm("nop", "--model.optim.lr '0.1", None)
    refused(LLAMA, UNIFIED, words=[*CONFIG, "--run_dir=x"], match="--run_dir")
    refused(LLAMA, UNIFIED, words=["--config"], match="compare: --config")
    run_spec, seed = compared((LLAMA, UNIFIED), CONFIG, 1).requests()[0]
    foreign = tmp_path / "runs" / run_spec.key(seed)
    foreign.mkdir(parents=True)
    (foreign / "thesis.tex").touch()
    refused(LLAMA, UNIFIED, match="not a run of this comparison")
    (tmp_path / "report.md").write_text("# Mine")
    refused(LLAMA, UNIFIED, match="--out")
    assert sorted(p.name for p in tmp_path.rglob("*")) == sorted(
        ["runs", foreign.name, "thesis.tex", "report.md"]
    )


def test_compare_interrupt_stops_children_keeps_complete_runs(tmp_path: Path) -> None:
    """Ctrl-C during seed 1 stops both child processes; the next call reuses seed 0."""
    code = (
        f"from tests.experiments.test_compare import *\nout = Path({str(tmp_path)!r})\nfigure,"
        " launcher = compared((LLAMA, UNIFIED), CONFIG, 2), (*FAKE, '--hang_seed',"
        " '1')\ncompare(figure, RunStore(out, launcher=launcher), out, jobs=2,"
        " console=Console(stderr=True))"
    )
    words = [sys.executable, "-c", code]
    parent = subprocess.Popen(
        words, stderr=subprocess.PIPE, text=True, preexec_fn=listen_to_interrupts
    )
    while len(list(tmp_path.glob("runs/*-seed1-*/hanging"))) < 2:
        assert parent.poll() is None
        time.sleep(0.05)
    parent.send_signal(signal.SIGINT)
    _, said = parent.communicate(timeout=20)
    assert parent.returncode != 0 and "Finished runs are kept" in said
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in left
    _, said = run(tmp_path, "--hang_seed", "1", seeds=1)
    assert "2 of 2 runs are complete" in said


def test_parse_arm_values_stay_complete() -> None:
    text = (
        '--model.scale_options.placement_at "{lm_head: dp}" --model.optim.lr=0.01 --data.corpus.dir'
        ' "2024_01 #1"'
    )
    label, arm = parse_arm("unified", text, None)
    assert label == "unified,placement_at={lm_head: dp},lr=0.01,dir=2024_01 #1"
    values = {"placement_at": {"lm_head": "dp"}, "lr": 0.01, "dir": "2024_01 #1"}
    assert {key.rpartition(".")[2]: value for key, value in arm.overrides.items()} == values


def test_report_has_a_panel_per_sharpness_scalar(tmp_path: Path) -> None:
    run(tmp_path, "--sharp", "50", seeds=2, arms=(parse_arm("nop"), LLAMA))
    tags = [
        f"sharpness/{part}/{key}"
        for part in ("all", "scale_input")
        for key in ("lambda_max", "trace")
    ]
    panels = own_figure([tmp_path]).panels[1:]
    assert sorted(panel.spec.tag for panel in panels) == tags
    notes = {panel.spec.tag: scalar_plots(panel)[1] for panel in panels}
    assert notes == {
        tag: [f"nop has no {tag} in its event files."] * ("input" in tag) for tag in tags
    }


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "run", partial(command.run, launcher=FAKE))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("fake")
def test_compare_command_arms_have_their_arguments(
    run_args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--baseline",
        "llama",
        "--arms",
        "hg+dp+or",
        "nop",
        "--seeds",
        "1",
        *run_args,
        "--json",
    ]
    assert command.run([*words, "--b_args=--model.optim.lr 0.1"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert [arm["label"] for arm in made["arms"]] == ["llama", "hg+dp+or,lr=0.1", "nop,lr=0.1"]
    assert [arm["args"] for arm in made["arms"]] == [
        [],
        ["--model.optim.lr", "0.1"],
        ["--model.optim.lr", "0.1"],
    ]
    assert [run["name"] for run in made["runs"]] == ["a-seed0", "b-seed0", "c-seed0"]
    out = Path("runs/compare/tiny-shards")
    assert Path(out, "llama_vs_hg+dp+or-lr=0.1_nop-lr=0.1/comparison.json").is_file()
    assert command.run([*words, "--a_label", "base"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert [arm["label"] for arm in made["arms"]] == ["base", "hg+dp+or", "nop"]


@pytest.mark.usefixtures("fake")
def test_compare_command_other_settings_keep_the_earlier_report(
    run_args: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The names of the arms do not tell: an optimizer or a length of all arms is in none of
    them."""

    def write_runs(figures: Sequence[Figure], out: Path, *_: str) -> None:
        write_csv(out / "results.csv", run_frame(figures, out))

    monkeypatch.setattr("lightning_sv.experiments.compare.write_report", write_runs)
    words = ["--baseline", "llama", "--arms", "unified", *run_args]
    root = Path("runs/compare/tiny-shards")
    for more in ([], ["--model.optim.name", "muon"], ["--trainer.max_steps", "6"], []):
        assert command.run([*words, "--seeds", "1", *more]) == 0
    assert command.run([*words, "--seeds", "2"]) == 0  # more pairs of the first comparison
    reports = {
        path.parent.name: len(numbers(path.parent)["runs"])
        for path in root.glob("*/comparison.json")
    }
    assert reports == {"llama_vs_unified": 4, "llama_vs_unified-2": 2, "llama_vs_unified-3": 2}
    capsys.readouterr()
    assert command.run([*words, "--seeds", "1", "--out", "mine"]) == 0
    assert "other settings" not in capsys.readouterr().err
    assert command.run([*words, "--seeds", "1", "--out", "mine", "--model.optim.name", "muon"]) == 0
    assert "other settings" in capsys.readouterr().err


@pytest.mark.usefixtures("fake")
def test_compare_command_that_fit_suggests_has_the_plain_baseline(
    run_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Although the config has exceptions for one branch; without `--a_args` the labels name
    them."""
    config = yaml.safe_load(Path(run_args[1]).read_text())
    config["model"] |= {"scale": "unified", "scale_options": {"placement_at": {"lm_head": "dp"}}}
    config["model"]["optim"] = {
        "name": "adamw",
        "lr": 0.01,
        "clip_by_role": {"input": 1.0, "head": math.inf},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    settings, data, _ = parse_run(["--config", str(tmp_path / "config.yaml")])
    assert has_baseline(settings, data)
    summary = dict.fromkeys(("val_loss", "val_perplexity", "val_bits_per_byte", "seconds"), 1.0) | {
        "model": "tiny", "label": settings.label, "tokens": 1, "skipped_steps": 0, "legs": [],
    }  # fmt: skip
    print_summary(Console(width=500), summary, tmp_path, settings)
    (line,) = re.findall(r"^compare +(.*)", capsys.readouterr().out, re.MULTILINE)
    words = shlex.split(line)
    words = [*words[words.index("compare") + 1 :], "--seeds", "1", "--json"]
    for more in ([], ["--a_args="]):
        assert command.run([*words, *more]) == 0
    one, two = (
        json.loads(part)
        for part in re.findall(r"^{.*?^}", capsys.readouterr().out, re.MULTILINE | re.DOTALL)
    )
    assert [arm["label"] for arm in one["arms"]] == ["llama", settings.label]
    assert [arm["label"] for arm in two["arms"]] == ["llama[lm_head=dp]", settings.label]
    assert (
        one["runs"][1]["dir"] == two["runs"][1]["dir"]
        and one["runs"][0]["dir"] != two["runs"][0]["dir"]
    )


def steps_handed_down(args: list[str], monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Return trainer.max_steps in the overrides of each arm that `compare` gets."""
    taken: list[Figure] = []
    monkeypatch.setattr(command, "compare", lambda figure, *_, **__: taken.append(figure))
    monkeypatch.setattr(command, "print_comparison", lambda *_: None)
    assert command.run(["--baseline", "llama", "--arms", "unified", "nop", *args]) == 0
    return [arm.overrides.get("trainer.max_steps") for arm in taken[0].spec.panels[0].arms.values()]


def test_compare_command_all_arms_have_the_tokens_of_a(
    run_args: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {
        s: parse_run([*run_args, "--model.scale", s])[0].plan.n_activated
        for s in ("llama", "unified")
    }
    steps = math.ceil(sizes["llama"] / 128)
    assert math.ceil(sizes["unified"] / 128) > steps  # its own tokens would be different
    budget = ["--trainer.max_steps", "-1", "--model.tokens_per_param", "1"]
    assert steps_handed_down([*run_args, *budget], monkeypatch) == [steps] * 3
    said = capsys.readouterr().err
    assert (
        f"every arm trains for {128 * steps:,} tokens, 1 per parameter of llama: {steps} steps of"
        " 128." in said
    )
    # given steps are only changed for arms with a different batch
    assert steps_handed_down(run_args, monkeypatch) == [None] * 3
    assert steps_handed_down([*run_args, "--b_args=--data.global_batch 8"], monkeypatch) == [
        None,
        6,
        6,
    ]
    assert (
        "12 steps of 128; 6 steps of unified,global_batch=8; 6 steps of nop"
        in capsys.readouterr().err
    )
    equal = [
        "--a_args=--trainer.max_steps 6",
        "--b_args=--data.global_batch 8 --trainer.max_steps 3",
    ]
    assert steps_handed_down([*run_args, *equal], monkeypatch) == [6, 3, 3]


WRONG = [
    (["--trainer.max_steps", "9", "--b_args=--data.global_batch 8"], "trainer.max_steps"),
    (["--b_args=--trainer.max_steps 3"], "trainer.max_steps"),
    (["--b_args=--model.tokens_per_param 1"], "model.tokens_per_param"),
    (["--b_args=--data.seq_len 16"], "data.seq_len"),
    (["--b_args=--data.corpus.dir {short}"], "corpus_hash"),
    (["--b_args=--data.micro_batch 3"], "data.micro_batch"),
    (["--data.seed", "5"], "data.seed"),
    (["--model.seed", "5"], "model.seed"),
    (["--trainer.val_check_interval", "0.5"], "data.validations instead"),
    (["--trainer.max_time", "00:01:00:00"], "trainer.max_time"),
    (
        ["--trainer.callbacks=EarlyStopping", "--trainer.callbacks.monitor=val/loss"],
        "EarlyStopping",
    ),
]


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(("args", "message"), thinned(WRONG, WRONG[::2], several=True))
def test_compare_command_wrong_arguments_refused_before_training(
    args: list[str], message: str, run_args: list[str], short_corpus: Path
) -> None:
    args = [word.format(short=short_corpus) for word in args]
    with pytest.raises(ValueError, match=message):
        command.run(["--baseline", "llama", "--arms", "unified", *run_args, *args])
    assert not Path("runs").exists()


def test_report_of_damaged_comparison_refused(tmp_path: Path, refused: Refused) -> None:
    for damaged in ("[" * 200_000, '{"runs": []}'):
        (tmp_path / "comparison.json").write_text(damaged)
        assert "comparison.json" in refused("report", str(tmp_path))
