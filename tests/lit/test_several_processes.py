"""DDP and FSDP2 train as one process does, and checkpoints, also sharded ones, move between all
three."""

import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch

from lightning_sv import Backbone, BackboneConfig, PretrainModule, TokenDataModule
from lightning_sv.lit.checkpoint.random_states import restore_rng, rng_states
from lightning_sv.lit.shard import shard
from lightning_sv.nn import MixtureOfExperts, RouterConfig
from lightning_sv.runs.checkpoint import check_checkpoint, load_backbone
from lightning_sv.runs.directory import LAST, read_summary
from lightning_sv.runs.events import Run, read_run
from lightning_sv.runs.sharded_checkpoint import is_sharded
from tests.conftest import MOE, argv, write_run_args
from tests.launch import launch
from tests.lit.own_trainer import SIZES
from tests.lit.runs import differences, leaving, run_fit
from tests.lit.several_processes import (
    CPU,
    MODELS,
    MOVED,
    SHARDED,
    STEPS,
    STOP_AT,
    STRATEGIES,
    arguments,
    fixed_choice,
)


@pytest.fixture(scope="module")
def args(short_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_run_args(short_corpus, tmp_path_factory.mktemp("args"))


@pytest.fixture(scope="module")
def alone(args: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every model on one process, and of one its run directory as it was in the middle."""
    out = tmp_path_factory.mktemp("alone")
    with (
        pytest.MonkeyPatch.context() as patch,
        leaving(out / "stopped", STOP_AT + 1, of=out / MOVED),
    ):
        patch.setattr(MixtureOfExperts, "_choose", fixed_choice)
        for name in MODELS:
            assert run_fit(arguments(args, name), out / name) == 0
    return out


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fit_two_processes_equal_one_and_share_checkpoints(
    strategy: str, args: list[str], alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = alone / "stopped" / LAST
    words = [str(tmp_path), strategy, str(moved), *args]
    ended = launch("tests.lit.several_processes", *words, logs=tmp_path, seconds=600)
    assert "".join(ended.logs).count("sharpness: 2 held-out sequences") == 2  # one per part
    for name in MODELS:
        one = read_run(alone / name)
        two = read_run(tmp_path / name)
        if name == "mixed":
            assert_same_run(one, two, loss=5e-3, other=None)
            continue
        assert_same_run(one, two, after=STOP_AT + 1 if name == MOVED else 0)
    # one process continues the run of two, with a different micro-batch and so a different
    # accumulation
    stopped = tmp_path / "moe-muon" / "stopped.ckpt"
    assert torch.load(stopped, weights_only=True)["global_step"] == STOP_AT + 1
    monkeypatch.setattr(MixtureOfExperts, "_choose", fixed_choice)
    go_on = argv(f"--data.micro_batch 4 --ckpt_path {stopped}")
    assert run_fit([*arguments(args, "moe-muon"), *go_on], tmp_path / "back") == 0
    assert_same_run(read_run(alone / "moe-muon"), read_run(tmp_path / "back"), after=STOP_AT + 1)


def test_restore_rng_rank_without_a_saved_state_keeps_its_own() -> None:
    device = torch.device("cpu")
    saved = rng_states(device)
    torch.rand(()), random.random(), np.random.rand()
    own = rng_states(device)
    for rank, expected in ((1, own), (0, saved)):
        restore_rng(saved, rank, device)
        assert differences(rng_states(device), expected) == []


def test_shard_meta_backbone_equals_an_initialized_one(
    config: BackboneConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_sv.lit.shard.fully_shard", lambda *_, **__: None)
    monkeypatch.setattr(
        torch, "empty_like", partial(torch.full_like, fill_value=torch.nan)
    )  # as memory may be
    config = replace(config, **MOE, router=RouterConfig(balance="bias"))
    with torch.device("meta"):
        model = Backbone(config, "unified")
    shard(model, None, torch.device("cpu"), seed=3)
    assert differences(model.state_dict(), Backbone(config, "unified", seed=3).state_dict()) == []


def assert_same_run(
    one: Run, two: Run, *, after: int = 0, loss: float = 1e-5, other: float | None = 3e-4
) -> None:
    """Every curve has the same steps after one of them; losses agree to 1e-5, all else to 3e-4.

    The standard error of a probe, a difference of its samples, is let differ by ten times that.
    """
    start = after * one.config["data"]["global_batch"] * one.config["data"]["seq_len"]
    assert two.curves.keys() == one.curves.keys()
    for tag, curve in one.curves.items():
        late = curve.tokens > start
        there = two.curve(tag).tokens > start
        assert two.curve(tag).tokens[there].tolist() == curve.tokens[late].tolist(), (two.dir, tag)
        close = loss if tag.endswith("/loss") else other
        if close is not None and not tag.startswith(("throughput", "memory", "sharpness/seconds")):
            values = curve.values[late]
            close *= 10 if tag.endswith("_error") else 1
            assert two.curve(tag).values[there] == pytest.approx(values, rel=close, abs=close), (
                two.dir,
                tag,
            )


OTHERS = argv(
    "--checkpoint.every_n_steps 2 --trainer.callbacks+=ModelCheckpoint"
    " --trainer.callbacks.every_n_train_steps=2 --trainer.callbacks.filename=step-{step}"
    " --trainer.callbacks.auto_insert_metric_name=false"
)


@pytest.mark.parametrize(
    ("strategy", "ranks", "more"),
    [
        pytest.param("fsdp", 1, [], marks=pytest.mark.long),
        ("fsdp", 1, [*SHARDED, *OTHERS]),
        ("ddp", 2, []),
    ],
)
def test_validate_as_under_nccl_equals_one_process(
    strategy: str, ranks: int, more: list[str], args: list[str], tmp_path: Path
) -> None:
    args = [*args, "--trainer.max_steps", "3"]
    assert run_fit(args, tmp_path / "alone") == 0
    words = [str(tmp_path / "run"), strategy, *args, *more]
    ended = launch("tests.lit.ranks", "as_under_nccl", *words, logs=tmp_path, ranks=ranks)
    (line,) = [line for line in ended.logs[0].splitlines() if line.startswith('{"val_loss"')]
    loss = read_summary(tmp_path / "alone")["val_loss"]
    assert json.loads(line)["val_loss"] == pytest.approx(loss, rel=1e-5)
    assert read_summary(tmp_path / "run")["val_loss"] == pytest.approx(loss, rel=1e-5)
    refused = [log.count("error: ckpt_path is none on rank 1; expected ") for log in ended.logs]
    assert refused == ([1, 1] if ranks == 2 else [0])
    if more:  # each removes its own checkpoints alone
        assert (tmp_path / "run" / LAST).resolve().name == "last-step-3.ckpt"
        assert is_sharded(tmp_path / "run" / LAST.parent / "step-2.ckpt")


@pytest.mark.parametrize("task", ["default_samplers", "fitted_again", "own_trainer", "own_weights"])
def test_two_ranks(task: str, short_corpus: Path, tmp_path: Path) -> None:
    """The docstring of the task in ranks.py says what it asserts."""
    launch("tests.lit.ranks", task, str(tmp_path), str(short_corpus), logs=tmp_path)


def test_fully_sharded_checkpoint_before_the_first_step_changes_no_step(
    short_corpus: Path, tmp_path: Path
) -> None:
    module = PretrainModule(SIZES, lr=1e-2, seed=0)
    trainer = L.Trainer(
        max_steps=0, limit_val_batches=0, logger=False, accelerator="cpu", default_root_dir=tmp_path
    )
    trainer.fit(module, TokenDataModule(short_corpus, seq_len=16, batch_size=2))
    alone = tmp_path / "alone.ckpt"
    trainer.save_checkpoint(alone)
    assert not check_checkpoint(str(alone))["optimizer_states"][0]["state"]
    words = [str(tmp_path), str(short_corpus), str(alone)]
    launch("tests.lit.ranks", "saved_before_a_step", *words, logs=tmp_path)


def fsdp(args: list[str], run: Path, ranks: int) -> list[str]:
    """Return the arguments of a fit with sharded checkpoints of every second step."""
    words = (
        f"--checkpoint.every_n_steps 2 --data.micro_batch 4 --trainer.devices {ranks}"
        f" --run_dir {run} --ckpt_path last"
    )
    model = arguments(args, "muon")
    return ["--config", str(STRATEGIES["fsdp"]), *CPU, *model, *SHARDED, *argv(words)]


@pytest.mark.long
def test_fit_sharded_checkpoint_on_fewer_ranks_equals_one_process(
    args: list[str], alone: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    killed = ["sharded_checkpoints", "7", *fsdp(args, run, 4)]
    ended = launch("tests.lit.ranks", *killed, logs=tmp_path, ranks=4, fails=True)
    assert is_sharded(run / LAST), ended
    step = check_checkpoint(str(run / LAST))["global_step"]
    assert step == 6

    # as if killed while writing
    partial = run / LAST.parent / ".last-step-6.ckpt.partial"
    partial.mkdir(exist_ok=True)
    launch("tests.lit.ranks", "sharded_checkpoints", "-1", *fsdp(args, run, 2), logs=tmp_path)
    assert not partial.exists()
    assert [leg["steps"] for leg in read_summary(run)["legs"]] == [step, STEPS - step]
    assert_same_run(read_run(alone / "muon"), read_run(run))
    assert [path.name for path in (run / LAST.parent).glob("last-step-*")] == [
        f"last-step-{STEPS}.ckpt"
    ]

    # one process reads it: the weights, and the optimizer's state of a run that goes on. Adam
    # divides small gradients by themselves, so that single entries depend on the order of sums; a
    # shard in the wrong place is off by its norm
    found, expected = (load_backbone(each).state_dict() for each in (run, alone / "muon"))
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 1e-2 * value.norm(), name
    states, expected_states = (
        check_checkpoint(str(each / LAST), tensors=True)["optimizer_states"][0]["state"]
        for each in (run, alone / "muon")
    )
    for number, state in expected_states.items():
        for key, value in state.items():
            error = (states[number][key] - value).norm()
            assert error <= 1e-2 * value.norm() + 1e-10, (number, key)  # of a gradient near 0
    more = argv(f"--trainer.max_steps 9 --ckpt_path {run / LAST}")
    assert run_fit([*arguments(args, "muon"), *more], tmp_path / "single") == 0
