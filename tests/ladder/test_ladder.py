"""A ladder trains what `fit` trains, in parts as in one, and `report` reads its runs."""

import json
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sv.__main__ import main
from lightning_sv.corpus import CorpusConfig
from lightning_sv.experiments.sources.own_runs import own_figure
from lightning_sv.ladder import __main__ as command
from lightning_sv.ladder.climb import Climb, Clock
from lightning_sv.ladder.lane import Lane
from lightning_sv.ladder.plan import load_ladder, runs_of
from lightning_sv.ladder.text import Text
from lightning_sv.ladder.trainee import Trainee, _compiled_loss
from lightning_sv.runs.events import Run, read_run

ROOT = Path(__file__).parents[2]
ARMS = {
    "llama": {"lr": 0.02, "init_std": 0.05},
    "hg+dp+or": {"lr": 0.01, "init_std": 0.08},
    "unified": {"lr": 0.03, "init_std": 0.1},
}
#: an epoch of the short corpus is five steps of them
BATCH, SEQ_LEN, STEPS, CLIP = 32, 32, 20, 0.5


def write_plan(corpus: Path, folder: Path, **changes: Any) -> Path:
    manifest = json.loads((corpus / "manifest.json").read_text())
    sizes = {"d_model": 32, "n_layer": 1, "n_head": 2, "d_ff": 40, "vocab_size": 300}
    parameters = 2 * 300 * 32 + 4 * 32 * 32 + 3 * 32 * 40 + 3 * 32
    plan = {
        "corpus": {"dir": str(corpus), **manifest["settings"], "chunk_bytes": str(manifest["settings"]["chunk_bytes"])},
        "seq_len": SEQ_LEN,
        "global_batch": BATCH,
        "validations": 3,
        "val_sequences": 48,
        "log_every": 1,
        "clip": CLIP,
        "schedule": {"warmup_ratio": 0.2},
        "rungs": [
            {
                "name": "w32", "backbone": sizes, "tokens_per_param": (STEPS - 0.5) * BATCH * SEQ_LEN / parameters,
                "seeds": [3, 5], "arms": ARMS,
            }
        ],
        "tune": {"tokens_per_param": 0.1, "seed": 9, "lr": [0.01, 0.02], "init_std": [0.05]},
    }  # fmt: skip
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(plan | changes))
    return path


def ladder(plan: Path, *words: str) -> int:
    return command.main([str(plan), "--device", "cpu", "--compile", "none", *words])


@pytest.fixture(scope="module")
def climbed(short_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plan and the state of a ladder climbed in one part."""
    folder = tmp_path_factory.mktemp("ladder")
    plan = write_plan(short_corpus, folder)
    assert ladder(plan, "--state", str(folder / "state"), "--out", str(folder / "out"), "--lanes", "2") == 0
    return folder


def same(a: Run, b: Run, tags: tuple[str, ...], tolerance: float) -> None:
    for tag in tags:
        x, y = a.curve(tag), b.curve(tag)
        assert x.tokens.tolist() == y.tokens.tolist(), tag
        assert np.linalg.norm(x.values - y.values) <= tolerance * np.linalg.norm(x.values), tag


@pytest.mark.parametrize("scale", ARMS)
def test_twenty_steps_are_those_of_fit(scale: str, climbed: Path, short_corpus: Path, tmp_path: Path) -> None:
    """The same blocks over four epochs, initialization, schedule, decay by role and clipping: the same losses."""
    ours = read_run(climbed / f"state/runs/w32/{read_label(scale)}-seed5")
    config = dict(yaml.safe_load((ours.dir / "config.yaml").read_text()))
    config["trainer"] |= {"accelerator": "cpu", "devices": 1}
    config["scalars"] = {"every_n_steps": 1}
    (tmp_path / "fit.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "--config", str(tmp_path / "fit.yaml"), "--run_dir", str(tmp_path / "run")]) == 0
    theirs = read_run(tmp_path / "run")
    assert len(theirs.curve("train/loss").values) == STEPS and theirs.curve("grad_norm").values.max() > CLIP
    # The same operations in the same order: to the last bit, but that validation is cut into other batches.
    same(theirs, ours, ("train/loss", "val/loss", "lr", "grad_norm"), 1e-5)
    assert ours.curve("train/loss").values[-1] < ours.curve("train/loss").values[0] - 0.5
    for key in ("label", "meaning", "seed", "steps", "tokens", "parameters", "lr", "corpus_hash", "tokenizer_sha256",
                "bigram_bits_per_byte", "skipped_steps", "activated_parameters"):  # fmt: skip
        assert ours.summary[key] == theirs.summary[key], key
    assert set(ours.summary) == set(theirs.summary)
    assert ours.summary["val_bits_per_byte"] == pytest.approx(theirs.summary["val_bits_per_byte"], rel=1e-4)


def read_label(scale: str) -> str:
    return "hg+dnp+or+iwd" if scale == "unified" else scale


def test_parts_are_one_run(climbed: Path, tmp_path: Path) -> None:
    """Stopped by the clock and by a kill between checkpoints, in new objects each time: bit for bit the same."""
    plan = load_ladder(climbed / "plan.yaml")
    text = Text(plan.corpus, plan.seq_len, plan.val_sequences, torch.device("cpu"))

    def part() -> Climb:
        return Climb(plan, plan.rungs[0], text, tmp_path, lanes=1, compile="none", say=lambda line: None)

    (tmp_path / "runs/w32/llama-seed3").mkdir(parents=True)
    (tmp_path / "runs/w32/llama-seed3/events.out.tfevents.0.old").write_bytes(b"of a part that left no checkpoint")
    first = part()
    first.record()  # three steps
    first.save(Clock(1, 0))
    for model in first.models:
        model.advance(2)  # lost: killed before the next checkpoint
    second = part()
    second.record()
    assert not second.run(Clock(0, 0), save_every=60) and 0 < second.models[0].done < STEPS
    third = part()
    third.record()
    assert third.run(Clock(1e6, 0), save_every=0) and third.finish() == []
    for run in sorted((climbed / "state/runs/w32").iterdir()):
        whole, parts = read_run(run), read_run(tmp_path / "runs/w32" / run.name)
        same(whole, parts, ("train/loss", "val/loss", "lr", "grad_norm"), 0.0)


class Waits(TorchDispatchMode):
    """Notes operators that ask the device for a value, or bring one from the host: a recorded step may do neither."""

    NAMES = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "lift_fresh", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        self.seen += [name] if name.startswith(self.NAMES) else []
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("number", range(len(ARMS)))
def test_a_step_never_waits_for_the_host(number: int, climbed: Path) -> None:
    plan = load_ladder(climbed / "plan.yaml")
    text = Text(plan.corpus, plan.seq_len, plan.val_sequences, torch.device("cpu"))
    model = Trainee(runs_of(plan, plan.rungs[0])[number], plan, text, Lane(torch.device("cpu")))
    model.advance(1)
    with Waits() as waits:
        model.step()
    assert waits.seen == []
    with Waits() as waits:
        float(torch.tensor([1.0, 2.0]).sum())
    assert {"lift_fresh", "_local_scalar_dense"} <= set(waits.seen)  # it does see them


def test_the_archive_is_what_report_judges(climbed: Path, tmp_path: Path) -> None:
    with tarfile.open(climbed / "out/runs.tar.gz") as tar:
        tar.extractall(tmp_path, filter="data")
    out = tmp_path / "report"
    assert main(["report", str(tmp_path / "runs/w32"), "--baseline", "llama", "--out", str(out)]) == 0
    text = (out / "report.md").read_text()
    assert "hg+dnp+or+iwd ends below llama" in text and "2 pairs" in text
    warnings = own_figure([tmp_path / "runs/w32"], baseline="llama").warnings
    assert len(warnings) == 4 and all("optim.lr" in w or "init_std" in w for w in warnings)  # what the arms differ in
    losses = json.loads((climbed / "out/ladder.json").read_text())["val_loss"]["w32"]
    assert {label: len(values) for label, values in losses.items()} == {read_label(scale): 2 for scale in ARMS}


def test_a_complete_rung_is_left_alone(climbed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in (climbed / "state").rglob("*events*")}
    assert ladder(climbed / "plan.yaml", "--state", str(climbed / "state")) == 0
    assert "w32: complete" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in (climbed / "state").rglob("*events*")}


def test_runs_of_another_plan_are_not_taken_for_done(climbed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--state", str(climbed / "state"), "--tokens_per_param", "0.1"]
    assert ladder(climbed / "plan.yaml", *words) == 2
    assert "was trained by another plan; choose another --state" in capsys.readouterr().err


def test_a_grid_finds_rates_that_the_study_takes(climbed: Path, tmp_path: Path) -> None:
    plan = climbed / "plan.yaml"
    assert ladder(plan, "--tune", "--state", str(tmp_path / "tune")) == 0
    best = json.loads((tmp_path / "tune/tuned.json").read_text())["best"]["w32"]
    runs = [read_run(path) for path in sorted((tmp_path / "tune/runs/w32").iterdir())]
    assert len(runs) == 2 * len(ARMS) and {run.summary["seed"] for run in runs} == {9}
    for label, found in best.items():
        mine = [run for run in runs if run.label == label]
        assert found["val_loss"] == min(run.summary["val_loss"] for run in mine)
        (chosen,) = [run for run in mine if run.summary["val_loss"] == found["val_loss"]]
        assert chosen.summary["lr"] == found["lr"] and found["init_std"] == 0.05
    words = ["--tuned", str(tmp_path / "tune/tuned.json"), "--tokens_per_param", "0.1", "--seeds", "1"]
    assert ladder(plan, "--state", str(tmp_path / "study"), *words) == 0
    run = read_run(tmp_path / "study/runs/w32/llama-seed3")
    assert run.summary["lr"] == best["llama"]["lr"] and run.config["model"]["tokens_per_param"] == 0.1


def test_a_run_that_is_not_finite_gets_no_summary(
    short_corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = yaml.safe_load(write_plan(short_corpus, tmp_path).read_text())
    plan["rungs"][0]["arms"] = {"llama": ARMS["llama"], "nop": {"lr": 1e20, "init_std": 0.02}}
    path = write_plan(short_corpus, tmp_path, rungs=plan["rungs"])
    assert ladder(path, "--state", str(tmp_path / "state"), "--seeds", "1") == 1
    assert "w32/nop-seed3; lower" in capsys.readouterr().err
    assert [p.parent.name for p in (tmp_path / "state").rglob("summary.json")] == ["llama-seed3"]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "graphs"), [("block", 2 * 2), ("model", 2)])
def test_compiled_losses_are_the_plain_ones(
    how: str, graphs: int, short_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A strategy is traced once for all its models, training and validation; Inductor itself is left out for time."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    _compiled_loss.cache_clear()
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    rungs = yaml.safe_load(write_plan(short_corpus, tmp_path).read_text())["rungs"]
    rungs[0]["arms"] = {arm: ARMS[arm] for arm in ("llama", "unified")}
    plan = write_plan(short_corpus, tmp_path, rungs=rungs, val_sequences=BATCH)  # one shape
    words = ["--device", "cpu", "--tokens_per_param", "0.15", "--compile", how, "--state", str(tmp_path)]
    assert command.main([str(plan), *words]) == 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == graphs
    _compiled_loss.cache_clear()
    assert ladder(plan, *words[2:4], "--state", str(tmp_path / "plain")) == 0
    for run in sorted((tmp_path / "plain/runs/w32").iterdir()):
        same(read_run(run), read_run(tmp_path / "runs/w32" / run.name), ("train/loss", "val/loss"), 1e-4)


def test_another_plan_does_not_continue(climbed: Path, short_corpus: Path, tmp_path: Path) -> None:
    plan = load_ladder(write_plan(short_corpus, tmp_path, log_every=2))
    text = Text(plan.corpus, plan.seq_len, plan.val_sequences, torch.device("cpu"))
    with pytest.raises(ValueError, match="of another plan or corpus"):
        Climb(plan, plan.rungs[0], text, climbed / "state", lanes=1, compile="none", say=print)


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        ({"rungs": []}, [], "rungs is empty"),
        ({"seq_length": 3}, [], "Key 'seq_length' not in 'Ladder'"),
        ({"global_batch": "4e1"}, [], "global_batch: Value '40.0' of type 'float'"),
        ({"rungs": [{"name": "w32"}]}, [], "keys and values are not where they must be (KeyError('arms'))"),
        ({"optim": {"lr": 0.1}}, [], "belongs to the arms"),
        ({"global_batch": 10_000}, [], "fewer than the 10000 sequences"),
        ({"tune": {"lr": [0.1]}}, [], "tune"),
        ({}, ["--only", "w33"], "it has w32"),
        ({}, ["--seeds", "0"], "--seeds is 0"),
        ({}, ["--lanes", "0"], "--lanes must be at least 1"),
        ({}, ["--tokens_per_param", "1", "2"], "one for each of 1 rungs"),
        ({}, ["--tuned", "/nowhere"], "is not what --tune writes"),
        ({}, ["--device", "tpu"], "invalid choice"),
    ],
)
def test_wrong_input_is_one_sentence(
    change: dict[str, Any], words: list[str], message: str, short_corpus: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    plan = write_plan(short_corpus, tmp_path, **change)
    assert ladder(plan, "--state", str(tmp_path / "state"), *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and not (tmp_path / "state/runs").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_device(climbed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(climbed / "plan.yaml")]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_the_plan_for_the_h200_is_sound() -> None:
    plan = load_ladder(ROOT / "conf/ladder/h200.yaml")
    assert [len(rung.seeds) for rung in plan.rungs] == [4, 3]
    assert len(plan.grid().rungs[0].arms) == 18
    data = yaml.safe_load((ROOT / "conf/data/installed.yaml").read_text())["data"]
    assert plan.corpus == CorpusConfig(**data["corpus"])
