"""The best and the latest checkpoints: which they are, after a kill and on a disk that is full too."""

import errno
import shutil
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_sv.__main__ import main
from lightning_sv.lit.checkpoint.callback import LastCheckpoint
from lightning_sv.lit.module import PretrainModule
from lightning_sv.runs.events import read_run
from tests.lit.runs import LAST, leaving, load, same_checkpoint

#: validates after every second step
KEPT = [
    "--checkpoint.every_n_steps", "3", "--checkpoint.keep", "2", "--checkpoint.best", "true", "--data.validations", "6",
    "--data.val_sequences", "2", "--branch_norms.every_n_steps", "100",
]  # fmt: skip
#: what the validations find
LOSSES = {2: 5.0, 4: 4.0, 6: 3.0, 8: 3.5, 10: float("nan"), 12: 3.1}


@pytest.fixture(autouse=True)
def _known_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        PretrainModule,
        "on_validation_epoch_end",
        lambda self: self.log("val/loss", torch.tensor(LOSSES[self.trainer.global_step]), logger=False),
    )


def steps(run: Path) -> dict[str, int]:
    """Which step each checkpoint is of."""
    folder = run / "checkpoints"
    return {file.name: torch.load(file, weights_only=True)["global_step"] for file in sorted(folder.iterdir())}


def test_best_and_latest_checkpoints_survive_a_kill(run_args: list[str], tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    args = [*run_args, *KEPT]
    with leaving(stopped, 6):  # killed when last.ckpt is of the best step, and is not yet named so
        assert main(["fit", *args, "--run_dir", str(whole)]) == 0
    assert steps(whole) == {"best.ckpt": 6, "last.ckpt": 12, "step-9.ckpt": 9, "step-12.ckpt": 12}
    assert steps(stopped) == {"best.ckpt": 4, "last.ckpt": 6, "step-3.ckpt": 3, "step-4.ckpt": 4}
    assert main(["fit", *args, "--ckpt_path", str(stopped / LAST)]) == 0
    assert steps(stopped) == steps(whole)
    same_checkpoint(whole, stopped)

    # from the best one, in a directory of its own
    copy = tmp_path / "copy/checkpoints/best.ckpt"
    copy.parent.mkdir(parents=True)
    shutil.copy(whole / "checkpoints/best.ckpt", copy)
    assert main(["fit", *args, "--ckpt_path", str(copy), "--run_dir", str(tmp_path / "other")]) == 0
    assert steps(tmp_path / "other")["best.ckpt"] == 6
    same_checkpoint(whole, tmp_path / "other")


def test_run_resumed_from_an_earlier_checkpoint_has_one_timeline(
    run_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    args = ["fit", *run_args, *KEPT, "--model.schedule.name", "wsd", "--checkpoint.keep", "3", "--run_dir", str(run)]
    assert main([*args, "--trainer.max_steps", "12"]) == 0
    assert steps(run) == {"best.ckpt": 6, "last.ckpt": 12, "step-6.ckpt": 6, "step-9.ckpt": 9, "step-12.ckpt": 12}
    monkeypatch.setitem(LOSSES, 8, 3.9)
    again = ["--trainer.max_steps", "8", "--checkpoint.best", "false", "--checkpoint.keep", "2"]
    assert main([*args, *again, "--ckpt_path", str(run / "checkpoints/step-6.ckpt")]) == 0
    assert steps(run) == {"best.ckpt": 6, "last.ckpt": 8, "step-6.ckpt": 6, "step-8.ckpt": 8}
    record = read_run(run)
    assert record.val_loss == pytest.approx(record.summary["val_loss"]) == pytest.approx(3.9)
    assert {int(curve.tokens[-1]) for curve in record.curves.values()} <= {5 * 128, 6 * 128, 8 * 128}
    # TensorBoard itself shows the same timeline
    events = EventAccumulator(str(run)).Reload()
    assert [event.step for event in events.Scalars("val/loss")] == record.curve("val/loss").tokens.tolist()


def test_full_disk_leaves_every_checkpoint(
    run_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    save, kept = torch.save, {}

    def full(checkpoint: dict, file: object) -> None:
        if checkpoint["global_step"] > 6:
            kept.update({path.name: path.read_bytes() for path in (run / "checkpoints").glob("*.ckpt")})
            raise OSError(errno.ENOSPC, "No space left on device")
        save(checkpoint, file)

    monkeypatch.setattr(torch, "save", full)
    assert main(["fit", *run_args, *KEPT, "--run_dir", str(run)]) == 1
    assert {"last.ckpt", "step-6.ckpt", "best.ckpt"} < set(kept)
    assert {path.name: path.read_bytes() for path in (run / "checkpoints").iterdir()} == kept
    assert load(run)["global_step"] == 6


def test_keep_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"checkpoint\.keep is 0"):
        LastCheckpoint(keep=0)
