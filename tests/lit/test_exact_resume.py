"""Resumed runs equal uninterrupted ones to the last bit; longer ones, errors of a user's code, kept
checkpoints."""

import errno
import itertools
import random
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_sv.__main__ import main
from lightning_sv.callbacks.logging import write_scalars
from lightning_sv.experiments.comparability import comparability_warnings
from lightning_sv.lit.checkpoint.atomic_io import AtomicCheckpointIO
from lightning_sv.lit.checkpoint.sharded_write import link_last
from lightning_sv.lit.fsdp import FullyShardedStrategy
from lightning_sv.optim import OPTIMIZERS, ScheduleConfig
from lightning_sv.runs.checkpoint import check_checkpoint
from lightning_sv.runs.directory import LAST
from lightning_sv.runs.events import read_run
from lightning_sv.runs.lock import acquire
from lightning_sv.scale.strategy import PARAMETERIZATIONS, PLACEMENTS
from tests.conftest import argv, file_size_limit, thinned
from tests.lit.runs import differences, leaving, load, run_fit, same_checkpoint, same_curves

STEPS = 20
STOP = 10
TABLES = (PARAMETERIZATIONS, PLACEMENTS, OPTIMIZERS)
#: each row of each table: a new one is tested without an edit
CASES = {
    "-".join(row): argv(f"--model.scale hg+{row[1]}+{row[0]} --model.optim.name {row[2]}")
    for row in itertools.islice(
        zip(*map(itertools.cycle, TABLES), strict=False), max(map(len, TABLES))
    )
}
MIXTURE = "--model.backbone.n_expert 6 --model.backbone.n_expert_active 2 --experts.every_n_steps 4"
CASES |= {
    "moe": argv(f"--model.scale unified {MIXTURE}"),
    "moe-bias": argv(
        f"{MIXTURE} --model.backbone.router.balance bias --model.optim.name muon"
        " --model.schedule.name wsd"
    ),
    "gemma": argv(
        "--model.scale iwd+offset --model.backbone.qk_norm true --model.backbone.post_norm true"
        " --model.optim.name muon"
    ),
}


class Dice(L.Callback):
    """Sample from every generator in every micro-batch, and log the samples exactly."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        values = {
            "torch": float(torch.rand(())),
            "numpy": np.random.normal(),
            "python": random.gauss(0.0, 1.0),
        }
        write_scalars(trainer, {f"dice/{name}": value for name, value in values.items()})


def train(args: list[str], run: Path, *more: str) -> None:
    words = f"--trainer.max_steps {STEPS} --model.optim.lr 6e-3 --checkpoint.every_n_steps {STOP}"
    words += f" --trainer.callbacks {__name__}.Dice --ckpt_path last"
    assert run_fit([*args, *argv(words), *more], run) == 0


@pytest.mark.filterwarnings("ignore:scale strategy")
@pytest.mark.parametrize("name", thinned(CASES, [*list(CASES)[:1], "moe-bias"]))
def test_resume_equals_uninterrupted_bit_for_bit(
    name: str, short_args: list[str], tmp_path: Path
) -> None:
    """Batches of the uninterrupted run are read by the process itself, those of the resumed run by
    two workers."""
    args = [*short_args, *CASES[name]]
    uninterrupted = tmp_path / "uninterrupted"
    resumed = tmp_path / "resumed"
    with leaving(resumed, STOP):
        train(args, uninterrupted, "--data.num_workers", "0")
    assert load(resumed)["global_step"] == STOP
    train(args, resumed, "--data.num_workers", "2")
    checkpoint = same_checkpoint(uninterrupted, resumed)
    curves = same_curves(uninterrupted, resumed)
    seen = [32 * 32 * step for step in range(1, STEPS + 1)]
    assert curves["train/loss"].tokens.tolist() == seen[3::4]
    for generator in ("torch", "numpy", "python"):
        # of a step, and the first micro-batch's
        assert len(set(curves[f"dice/{generator}"].values)) == STEPS + 1
    # several times through the corpus, Python's own modules, which are shorter in some versions
    assert checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["started"] >= 3


class Stop(L.Callback):
    """End the run in the first of step 7's two micro-batches, or in the validation after step 5, or
    in its epoch."""

    def __init__(self, at: str):
        self.at = at

    def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        trainer.should_stop |= self.at == "batch" and trainer.fit_loop.total_batch_idx == 12

    def on_validation_end(self, trainer: L.Trainer, *args: object) -> None:
        trainer.should_stop |= self.at == "validation" and trainer.global_step == 5

    def on_train_epoch_end(self, trainer: L.Trainer, *args: object) -> None:
        trainer.should_stop |= self.at == "epoch"


@pytest.mark.parametrize(
    ("at", "step"),
    thinned([("batch", 7), ("validation", 5), ("epoch", 5)], [("batch", 7)], several=True),
)
def test_fit_ended_by_a_callback_has_a_checkpoint_and_resumes(
    at: str, step: int, short_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uninterrupted = tmp_path / "uninterrupted"
    ended = tmp_path / "ended"
    more = argv("--data.validations 2 --trainer.max_steps 10")
    train(short_args, uninterrupted, *more)
    stop = argv(f"--trainer.callbacks+={__name__}.Stop --trainer.callbacks.at {at}")
    train(short_args, ended, *more, *stop)
    assert load(ended)["global_step"] == step
    assert f"stopped at step {step}; resume with" in capsys.readouterr().err
    train(short_args, ended, *more)
    for key in ("state_dict", "optimizer_states", "TokenDataModule"):
        assert differences(load(uninterrupted)[key], load(ended)[key]) == []


WSD = ScheduleConfig("wsd", stable_ratio=0.8)


@pytest.mark.parametrize("schedule", thinned(["wsd", "cos"], ["wsd"]))
def test_fit_extended_run_records_its_lengths(
    schedule: str, run_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """wsd before its decay continues as the longer run would; a cosine with a warning."""
    run_dir = tmp_path / "run"
    words = f"--model.schedule.name {schedule} --checkpoint.every_n_steps 4 --trainer.max_steps"
    fit = [*run_args, *argv(words)]
    with leaving(run_dir, 4):
        assert run_fit([*fit, "8"], tmp_path / "shorter") == 0
    capsys.readouterr()
    assert run_fit([*fit, "12", "--ckpt_path", "last"], run_dir) == 0
    assert ("the learning rate is" in capsys.readouterr().err) == (schedule == "cos")
    run = read_run(run_dir)
    legs = run.summary["legs"]
    assert run.summary["steps"] == run.config["trainer"]["max_steps"] == 12
    assert [(leg["steps"], leg["max_steps"]) for leg in legs] == [(4, 8), (8, 12)]
    assert run.summary["seconds"] == sum(leg["seconds"] for leg in legs)
    assert {leg["numerics"]["precision"] for leg in legs} == {"32-true"}
    assert run_fit([*fit, "8", "--ckpt_path", "last"], run_dir) == 2  # it has 12
    assert "trainer.max_steps" in capsys.readouterr().err
    epoch = argv("--ckpt_path last --trainer.max_epochs 1 --trainer.limit_train_batches 3")
    assert run_fit([*fit, "12", *epoch], run_dir) == 2
    assert "trainer.max_epochs is 3" in capsys.readouterr().err
    assert read_run(run_dir).summary == run.summary
    (warning, *_) = comparability_warnings({"run": run})
    assert "learning rate is that of no single schedule" in warning
    if schedule == "wsd":
        lr = run.curve("lr").values
        assert lr.tolist() == pytest.approx([lr[0] * WSD.factor(step, 12) for step in range(12)])


#: validates after every second step, and keeps a checkpoint of every third one
KEPT = argv(
    "--data.validations 6 --data.val_sequences 2 --branch_norms.every_n_steps 100"
    " --checkpoint.every_n_steps 3 --trainer.callbacks+=ModelCheckpoint"
    " --trainer.callbacks.every_n_train_steps=3 --trainer.callbacks.save_top_k=3"
    " --trainer.callbacks.monitor=step --trainer.callbacks.mode=max"
    " --trainer.callbacks.enable_version_counter=false"
)


def steps(run: Path) -> dict[str, int]:
    """Return the step of each checkpoint."""
    return {
        file.name: check_checkpoint(str(file))["global_step"]
        for file in (run / LAST).parent.iterdir()
    }


def test_model_checkpoint_of_an_earlier_step_resumes(run_args: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    args = [*run_args, *KEPT]
    assert run_fit(args, run) == 0
    named = {f"epoch=0-step={step}.ckpt": step for step in (12, 9, 6)}
    assert steps(run) == {**named, "last.ckpt": 12}
    whole = shutil.copytree(run, tmp_path / "whole")
    for name in named:
        assert main(["fit", *args, "--ckpt_path", str(run / "checkpoints" / name)]) == 0
        curves = same_curves(whole, run)
        # TensorBoard itself shows the same timeline
        shown = EventAccumulator(str(run)).Reload().Scalars("val/loss")
        assert [event.step for event in shown] == curves["val/loss"].tokens.tolist()


def test_checkpoint_replaced_while_waiting_for_the_lock_is_refused(
    run_args: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    stopped = tmp_path / "stopped"
    args = [*run_args, *argv("--trainer.max_steps 2 --checkpoint.every_n_steps 1")]
    with leaving(stopped, 1):
        assert run_fit(args, run) == 0

    def acquire_late(*given: Any, **more: Any) -> Any:
        shutil.copy(run / LAST, stopped / LAST)
        return acquire(*given, **more)

    monkeypatch.setattr("lightning_sv.lit.fit_run.acquire", acquire_late)
    assert run_fit([*args, "--ckpt_path", "last"], stopped) == 2
    assert "last.ckpt at step 2" in capsys.readouterr().err


def test_link_last_replaces_a_folder_and_a_link(tmp_path: Path) -> None:
    """The copy of a run may have a folder instead of the link. Folders of others stay."""
    last = tmp_path / "last.ckpt"
    others = tmp_path / "step-3.ckpt"
    last.mkdir()
    others.mkdir()
    for step in (2, 4):
        written = tmp_path / f"step-{step}.ckpt"
        written.mkdir()
        link_last(last, written)
        assert last.is_symlink() and last.resolve() == written.resolve()
        assert set(tmp_path.iterdir()) == {last, written, others}


def test_checkpoint_file_replaces_a_sharded_checkpoint(tmp_path: Path) -> None:
    """A sharded run that goes on unsharded, from its link or from a copy with folders."""
    last = tmp_path / "last.ckpt"
    folder = tmp_path / "last-step-2.ckpt"
    folder.mkdir()
    (folder / "meta.pt").write_text("shards")
    last.symlink_to(folder.name)
    (tmp_path / ".last.ckpt.partial").mkdir()  # of a write of shards that was killed
    strategy = FullyShardedStrategy()
    strategy.save_checkpoint({"step": 3}, last)
    strategy.save_checkpoint({"step": 4}, folder)
    assert [torch.load(path)["step"] for path in (last, folder)] == [3, 4]
    assert set(tmp_path.iterdir()) == {last, folder}


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_write_to_a_full_disk_leaves_the_checkpoint(share: float, tmp_path: Path) -> None:
    """torch's zip writer fails at its end too, by an error of its own if some bytes were
    written."""
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"weight": torch.zeros(9_999)}, path)
    kept = path.read_bytes()
    with (
        file_size_limit(int(share * len(kept))),
        pytest.raises(OSError, match=str(path)) as caught,
    ):
        AtomicCheckpointIO().save_checkpoint({"weight": torch.ones(9_999)}, path)
    assert caught.value.errno == errno.EFBIG
    assert path.read_bytes() == kept and list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match=f"could not write {path}/"):
        AtomicCheckpointIO().save_checkpoint({}, path / "below_a_file.ckpt")
