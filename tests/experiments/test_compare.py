"""Comparisons end to end with fake training whose losses are known, and the arguments of
`lightning-sv compare`."""

import io
import math
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import yaml
from rich.console import Console

from lightning_sv.cli import compare as command
from lightning_sv.errors import ConfigError, RunError
from lightning_sv.experiments.arms import runs_of
from lightning_sv.experiments.compare import compare, output_of, print_comparison
from lightning_sv.experiments.plan import plan_figure
from lightning_sv.experiments.report.results_csv import run_frame, write_csv
from lightning_sv.experiments.resolver import RunResolver
from lightning_sv.experiments.results import Figure, PlannedFigure
from lightning_sv.experiments.run_store import RunStore
from lightning_sv.experiments.sources.from_cli import (
    NamedArm,
    compared_figure,
    parse_arm,
    request_arms,
)
from lightning_sv.experiments.sources.from_runs import own_figure
from lightning_sv.experiments.spec import load_budget, load_figure
from lightning_sv.lit.run_arguments import parse_run
from lightning_sv.statistics.paired import PairedDifference
from lightning_sv.statistics.verdicts import direction
from tests.conftest import CONFIG, listen_to_interrupts, thinned

FAKE = (sys.executable, str(Path(__file__).with_name("fake_fit.py")))
LLAMA = parse_arm("llama")
UNIFIED = parse_arm("unified")
NOP = parse_arm("nop")


def compared(arms: Sequence[NamedArm], words: Sequence[str], seeds: int) -> PlannedFigure:
    return compared_figure(request_arms(arms, words, {}), seeds)


def run(
    out: Path,
    *fake: str,
    words: Sequence[str] = CONFIG,
    seeds: int = 3,
    arms: Sequence[NamedArm] = (LLAMA, UNIFIED),
) -> tuple[Figure, str]:
    """Return the figure and the output; `fake` are more arguments of the fake training."""
    console = Console(file=io.StringIO(), width=400)
    runs = RunStore(out, launcher=(*FAKE, *fake))
    figure = compare(compared(arms, words, seeds), runs, out, jobs=2, console=console)
    print_comparison(console, figure, out)
    return figure, console.file.getvalue()  # type: ignore[attr-defined]


def differences(figure: Figure) -> list[PairedDifference]:
    return [pair.difference for pair in figure.panels[0].pairs]


def run_dirs(figure: Figure) -> list[Path]:
    return [run.dir for run in runs_of(figure.panels[0].arms)]


def run_dir(out: Path, strategy: str, seed: int) -> Path:
    """Return the directory of a run of `tiny`, whose name ends with a hash."""
    (found,) = (out / "runs").glob(f"tiny-{strategy}-seed{seed}-*")
    return found


def keys_of(figure: PlannedFigure) -> set[str]:
    return {run_spec.run_name(seed) for run_spec, seed in figure.requests()}


def keys(
    words: Sequence[str], arms: Sequence[NamedArm] = (LLAMA, UNIFIED), seeds: int = 1
) -> set[str]:
    return keys_of(compared(arms, [*CONFIG, *words], seeds))


def test_run_keys_are_those_of_the_configuration(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("model: {optim: {weight_decay: 0.1}}\n")
    words = ["--config", str(config)]
    one = keys(words)
    assert one < keys(words, seeds=2)
    # a different spelling of the same configuration
    config.write_text("# a word\nmodel: {optim: {weight_decay: 0.1}}\n")
    swapped = [parse_arm("iwd+or+dnp+hg", "", "the paper's"), NOP, LLAMA]
    assert one < keys([*words, "--model.optim.weight_decay=0.1"], swapped)
    assert one == keys([*words, "--data.full_last_validation", "true"])
    # a different configuration
    assert one.isdisjoint(keys([*words, "--data.full_last_validation", "false"]))
    config.write_text("model: {optim: {weight_decay: 0.2}}\n")
    other = keys(words)
    assert one.isdisjoint(other)
    # a section is merged into that of the file
    section = ["--model.optim", "{weight_decay: 0.2}"]
    assert keys(["--config", str(config), *section]) == other
    beta = ["--model.optim", "{beta1: 0.8}"]
    with_beta = keys([*words, *beta])
    config.write_text("model: {optim: {weight_decay: 0.3}}\n")
    assert with_beta.isdisjoint(keys([*words, *beta]))
    assert keys([*section, *words]) == keys(words)  # and a later file replaces its values


def test_later_file_replaces_all_entries_of_a_dictionary(tmp_path: Path) -> None:
    """As for `fit`. Two files with it are refused, because their settings are merged in names."""
    config = tmp_path / "one.yaml"
    config.write_text("model: {optim: {weight_decay_by_role: {matrix: 0.2}}}")
    words = ["--config", str(config)]
    earlier = ["--model.optim.weight_decay_by_role", "{input: 0.1}"]
    assert keys([*earlier, *words]) == keys(words)
    other = tmp_path / "other.yaml"
    other.write_text("model: {optim: {weight_decay_by_role: {input: 0.1}}}")
    with pytest.raises(ConfigError, match="weight_decay_by_role in .*other"):
        keys([*words, "--config", str(other)])
    arm = parse_arm("hg", f"--config {other}")
    assert keys(words, [LLAMA, arm]) & keys([], [LLAMA, arm])


def test_run_keys_have_the_content_of_initial_weights(tmp_path: Path) -> None:
    contents = {"one.ckpt": "weights", "same/checkpoints/last.ckpt": "weights", "other.ckpt": "no"}
    (tmp_path / "same/checkpoints").mkdir(parents=True)
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    one, same, other = (
        keys(["--model.init_from", str(tmp_path / start)])
        for start in ("one.ckpt", "same", "other.ckpt")
    )
    assert one == same and one.isdisjoint(other)
    with pytest.raises(ConfigError, match=r"model\.init_from"):
        keys(["--model.init_from", str(tmp_path / "absent")])


@pytest.fixture(autouse=True)
def _table_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write no pages, which take most of the time; `three` is created before and has them."""

    def write_runs(figures: Sequence[Figure], out: Path, *_: str) -> None:
        write_csv(out / "results.csv", run_frame(figures, out))

    monkeypatch.setattr("lightning_sv.experiments.compare.write_report", write_runs)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Figure]:
    """Return three pairs with differences -0.02, -0.04, -0.03."""
    out = tmp_path_factory.mktemp("three")
    return out, run(out)[0]


def test_compare_numbers_equal_the_hand_computation(three: tuple[Path, Figure]) -> None:
    """mean -0.03, se 0.01 / sqrt(3), t(0.975, 2) = 4.3027: interval -0.0548 to -0.0052."""
    out, figure = three
    panel = figure.panels[0]
    (pair,) = panel.pairs
    assert pair.b.label == "unified" and direction(pair.difference) == "lower"
    assert pair.difference.mean == pytest.approx(-0.03, abs=1e-6)
    assert pair.difference.low == pytest.approx(-0.03 - 4.302653 * 0.01 / 3**0.5, abs=1e-5)
    assert pair.b.losses - pair.a.losses == pytest.approx([-0.02, -0.04, -0.03], abs=1e-6)
    assert panel.arms[0].losses == pytest.approx([3.0, 3.01, 3.02])
    # both gain 0.1 nats per 1,000 tokens, so B reaches the target 200, 400 and 300 tokens earlier
    assert pair.efficiency.tokens_b == pytest.approx([9800, 9600, 9700], abs=0.1)
    assert figure.warnings == ()  # neither about a seed nor about a path in the run directory
    page = (out / "report.md").read_text()
    assert f"{pair.verdict_sentence} {pair.efficiency_sentence}" in page and "claim" not in page
    assert (out / "figures/comparison-1-difference.png").stat().st_size > 10_000


def test_compare_runs_are_read_again_also_if_moved(
    three: tuple[Path, Figure], tmp_path: Path
) -> None:
    out, figure = three
    moved = tmp_path / "moved"
    shutil.copytree(out, moved)
    again = own_figure([moved / "runs"], baseline="llama")
    assert again.verdicts == () and differences(again) == differences(figure)
    assert [arm.label for arm in again.panels[0].arms] == ["llama", "hg+dnp+or+iwd"]
    assert all(path.is_relative_to(moved) for path in run_dirs(again))


def diverge(run_dir: Path) -> None:
    (run_dir / "summary.json").unlink()
    (run_dir / "nonfinite.jsonl").write_text('{"step": 5}\n')


def test_compare_diverged_run_report_of_its_runs_is_equal(tmp_path: Path) -> None:
    arms = (LLAMA, UNIFIED, NOP)
    run(tmp_path, arms=arms)
    diverge(run_dir(tmp_path, "nop", 0))
    found, printed = run(tmp_path, arms=arms)
    assert "nop, seed 0 diverged; remove " in printed
    assert [pair.a.seeds for pair in found.panels[0].pairs] == [(0, 1, 2), (1, 2)]
    assert "nop diverged" in found.warnings[0]

    again = own_figure([tmp_path / "runs"], baseline="llama")
    assert "nop" in again.warnings[-1] and differences(again) == differences(found)
    losses = [arm.losses.tolist() for arm in again.panels[0].arms]
    assert losses == [arm.losses.tolist() for arm in found.panels[0].arms]

    for seed in (1, 2):
        diverge(run_dir(tmp_path, "nop", seed))
    found, _ = run(tmp_path, arms=arms)
    assert [arm.label for arm in found.panels[0].arms] == ["llama", "unified"]
    with pytest.raises(RunError, match="nop"):
        run(tmp_path, arms=(LLAMA, NOP))


def test_compare_run_keys_equal_those_of_a_figure() -> None:
    resolver = RunResolver(load_budget("cpu-100"), {"model.optim.lr": 0.05})
    for spec, _ in plan_figure(load_figure("protocol"), resolver).requests():
        rate = spec.args[spec.args.index("--model.optim.lr") + 1]
        assert rate == "0.05"  # the key of the command line wins over the rate of the figure
    budget = load_budget("cpu")
    plain = {"dense": replace(budget.models["dense"], overrides={}, tuned="")}  # as in `compare`
    budget = replace(budget, overrides={}, seeds=3, first_seed=0, models=plain)
    figure = plan_figure(load_figure("heterogeneity"), RunResolver(budget, {}))
    planned = compared([LLAMA, parse_arm("hg"), parse_arm("hg+dp+or")], CONFIG, 3)
    assert keys_of(planned) == keys_of(figure)


def test_compare_failed_run_shows_its_log_and_is_repeated(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(RunError, match=r"(?s)seed 1 failed.*simulated failure"):
            run(tmp_path, "--fail_seed", "1", seeds=2)
    assert (run_dir(tmp_path, "hg+dnp+or+iwd", 0) / "summary.json").exists()


def test_compare_different_corpora_refused_requested_settings_are_not_warned_about(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="corpus_hash"):
        run(tmp_path / "corpus", "--corpus_of", "hg+dnp+or+iwd", "decaf", seeds=1)
    faster = parse_arm("unified", "--model.optim.lr 0.1", "unified")
    found, _ = run(tmp_path / "config", seeds=1, arms=(LLAMA, faster))
    assert "one seed: unified" in found.panels[0].notes[-1] and found.warnings == ()


def test_compare_files_of_others_are_not_replaced(tmp_path: Path) -> None:
    run_spec, seed = compared((LLAMA, UNIFIED), CONFIG, 1).requests()[0]
    foreign = tmp_path / "runs" / run_spec.run_name(seed)
    foreign.mkdir(parents=True)
    (foreign / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=re.escape(str(foreign))):
        run(tmp_path)
    (tmp_path / "report.md").write_text("# Mine")
    with pytest.raises(ConfigError, match="--out"):
        run(tmp_path)
    assert (tmp_path / "report.md").read_text() == "# Mine"


def test_compare_interrupt_stops_children_keeps_complete_runs(tmp_path: Path) -> None:
    """Ctrl-C during seed 1 stops both child processes; the next call reuses seed 0."""
    code = (
        "from tests.experiments.test_compare import *\n"
        f"run(Path({str(tmp_path)!r}), '--hang_seed', '1', seeds=2)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=listen_to_interrupts,
    )
    while len(list(tmp_path.glob("runs/*-seed1-*/hanging"))) < 2:
        assert parent.poll() is None
        time.sleep(0.05)
    parent.send_signal(signal.SIGINT)
    parent.communicate(timeout=20)
    assert parent.returncode != 0
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in left
    _, printed = run(tmp_path, "--hang_seed", "1", seeds=1)
    assert "2 of 2 runs are complete" in printed


def test_parse_arm_values_stay_complete() -> None:
    text = (
        '--model.scale_options.placement_at "{lm_head: dp}" --model.optim.lr=0.01 '
        '--data.corpus.dir "2024_01 #1"'
    )
    label, arm = parse_arm("unified", text, None)
    assert label == "unified,placement_at={lm_head: dp},lr=0.01,dir=2024_01 #1"
    assert list(arm.overrides.values()) == [{"lm_head": "dp"}, 0.01, "2024_01 #1"]
    with pytest.raises(ConfigError, match="nop"):
        parse_arm("nop", "--model.optim.lr '0.1", None)


def test_report_has_a_panel_per_sharpness_scalar(tmp_path: Path) -> None:
    run(tmp_path, "--sharp", "50", seeds=2, arms=(NOP, LLAMA))
    panels = {panel.spec.tag: panel for panel in own_figure([tmp_path / "runs"]).panels[1:]}
    tags = ("all/lambda_max", "all/trace", "scale_input/lambda_max", "scale_input/trace")
    assert sorted(panels) == [f"sharpness/{tag}" for tag in tags]
    for tag, panel in panels.items():
        notes = panel.kind.draw(panel).notes
        assert len(notes) == ("scale_input" in tag)  # nop has none


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "run", partial(command.run, launcher=FAKE))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("fake")
def test_compare_command_arms_have_their_arguments(run_args: list[str]) -> None:
    words = ["--baseline", "llama", "--arms", "hg+dp+or", "nop", "--seeds", "1", *run_args]
    assert command.run([*words, "--b_args=--model.optim.lr 0.1"]) == 0
    out = Path("runs/compare/tiny-shards/llama_vs_hg+dp+or-lr=0.1_nop-lr=0.1")
    table = pd.read_csv(out / "results.csv")
    assert table["arm"].tolist() == ["llama", "hg+dp+or,lr=0.1", "nop,lr=0.1"]
    configs = [yaml.safe_load((out / run / "config.yaml").read_text()) for run in table["run"]]
    rates = [config["model"]["optim"]["lr"] for config in configs]
    assert [rate == 0.1 for rate in rates] == [False, True, True]
    assert command.run([*words, "--a_label", "base"]) == 0
    table = pd.read_csv("runs/compare/tiny-shards/base_vs_hg+dp+or_nop/results.csv")
    assert table["arm"].tolist() == ["base", "hg+dp+or", "nop"]


@pytest.mark.usefixtures("fake")
def test_compare_command_other_settings_keep_the_earlier_report(run_args: list[str]) -> None:
    """An optimizer or a length of all arms is not in the name of the folder."""
    words = ["--baseline", "llama", "--arms", "unified", *run_args, "--seeds"]
    muon = ["1", "--model.optim.name", "muon"]
    fewer = ["1"]
    same_unified = ["1", "--a_label", "llama", "--a_args=--model.optim.lr 0.1"]
    for more in (["1"], muon, ["2"], fewer, same_unified):
        assert command.run([*words, *more]) == 0
    counts = {}
    for path in Path("runs/compare/tiny-shards").glob("*/results.csv"):
        counts[path.parent.name] = len(pd.read_csv(path))
    assert counts.pop("llama_vs_unified") == 4
    assert counts == {f"llama_vs_unified-{number}": 2 for number in (2, 3, 4)}


def test_output_of_commands_at_once_have_their_own_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_args: list[str]
) -> None:
    """Before any of them has a report; the same command again has its folder."""
    monkeypatch.chdir(tmp_path)
    folders = []
    for words in ([], ["--model.optim.name", "muon"], []):
        arms = request_arms([LLAMA, UNIFIED], [*run_args, *words], {})
        out, _ = output_of(compared_figure(arms, 1), arms[0].run, "compare", None, FAKE)
        folders.append(out.name)
    assert folders == ["llama_vs_unified", "llama_vs_unified-2", "llama_vs_unified"]


def test_compare_all_arms_have_the_steps_of_the_first(run_args: list[str]) -> None:
    def steps(a: str, b: str, *words: str) -> set[int]:
        arms = [parse_arm("llama", a), parse_arm("unified", b), NOP]
        return {spec.steps for spec, _ in compared(arms, [*run_args, *words], 1).requests()}

    def own_steps(scale: str) -> int:
        settings, _, _ = parse_run([*run_args, "--model.scale", scale])
        return math.ceil(settings.plan.n_activated / 128)

    six = "--trainer.max_steps 6"
    assert steps("", "") == {12}
    assert steps(six, "") == {6}
    per_parameter = ["--trainer.max_steps", "-1", "--model.tokens_per_param", "1"]
    assert steps("", "", *per_parameter) == {own_steps("llama")} != {own_steps("unified")}


#: words after those of a valid command, and words of the error
WRONG = [
    (["--arms", "llama"], "'llama'"),
    (["--arms", "unified", "hg+dnp+or+iwd"], "'unified' and 'hg"),
    (["--b_args=--seed_everything 3"], "--seed_everything"),
    (["--run_dir=x"], "--run_dir"),
    (["--json", "true"], "--json"),
    (["--config"], "--config"),
    (["--b_args=--data.global_batch 8"], "tokens per step"),
    (["--b_args=--trainer.max_steps 3"], "trainer.max_steps"),
    (["--b_args=--model.tokens_per_param 1"], "model.tokens_per_param"),
    (["--b_args=--data.seq_len 16 --data.global_batch 8"], "data.seq_len"),
    (["--b_args=--data.corpus.dir {short}"], "corpus_hash"),
    (["--b_args=--data.micro_batch 3"], "data.micro_batch"),
    (["--data.seed", "5"], "data.seed"),
    (["--model.seed", "5"], "model.seed"),
    (["--trainer.val_check_interval", "0.5"], "data.validations"),
    (["--trainer.max_time", "00:01:00:00"], "trainer.max_time"),
    (["--trainer.callbacks=EarlyStopping", "--trainer.callbacks.monitor=x"], "EarlyStopping"),
]


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(("args", "key"), thinned(WRONG, WRONG[::2], several=True))
def test_compare_command_wrong_arguments_refused_before_training(
    args: list[str], key: str, run_args: list[str], short_corpus: Path
) -> None:
    args = [word.format(short=short_corpus) for word in args]
    with pytest.raises(ConfigError, match=key):
        command.run(["--baseline", "llama", "--arms", "unified", *run_args, *args])
    assert not Path("runs").exists()
