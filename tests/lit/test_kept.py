"""The latest checkpoints: which they are, after a kill, a resume from an earlier one, and on a full disk."""

import errno
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_sv.__main__ import main
from lightning_sv.runs.events import read_run
from tests.conftest import Refused
from tests.lit.runs import LAST, leaving, load, same_checkpoint

#: validates after every second step
KEPT = [
    "--checkpoint.every_n_steps", "3", "--checkpoint.keep", "2", "--data.validations", "6",
    "--data.val_sequences", "2", "--branch_norms.every_n_steps", "100",
]  # fmt: skip


def steps(run: Path) -> dict[str, int]:
    """Which step each checkpoint is of."""
    folder = run / "checkpoints"
    return {file.name: torch.load(file, weights_only=True)["global_step"] for file in sorted(folder.iterdir())}


def test_latest_checkpoints_survive_a_kill(run_args: list[str], tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    args = [*run_args, *KEPT]
    with leaving(stopped, 6):  # killed when last.ckpt is of step 6, and step-6.ckpt does not exist yet
        assert main(["fit", *args, "--run_dir", str(whole)]) == 0
    assert steps(whole) == {"last.ckpt": 12, "step-9.ckpt": 9, "step-12.ckpt": 12}
    assert steps(stopped) == {"last.ckpt": 6, "step-3.ckpt": 3}
    assert main(["fit", *args, "--ckpt_path", str(stopped / LAST)]) == 0
    assert steps(stopped) == steps(whole)
    same_checkpoint(whole, stopped)


@pytest.mark.long
def test_run_resumed_from_an_earlier_checkpoint_has_one_timeline(run_args: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    args = ["fit", *run_args, *KEPT, "--model.schedule.name", "wsd", "--checkpoint.keep", "3", "--run_dir", str(run)]
    assert main([*args, "--trainer.max_steps", "12"]) == 0
    assert steps(run) == {"last.ckpt": 12, "step-6.ckpt": 6, "step-9.ckpt": 9, "step-12.ckpt": 12}
    again = ["--trainer.max_steps", "8", "--checkpoint.keep", "2", "--data.validations", "4"]
    assert main([*args, *again, "--ckpt_path", str(run / "checkpoints/step-6.ckpt")]) == 0
    assert steps(run) == {"last.ckpt": 8, "step-6.ckpt": 6, "step-8.ckpt": 8}
    record = read_run(run)
    assert record.val_loss == pytest.approx(record.summary["val_loss"])
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
    assert set(kept) == {"last.ckpt", "step-3.ckpt", "step-6.ckpt"}
    assert {path.name: path.read_bytes() for path in (run / "checkpoints").iterdir()} == kept
    assert load(run)["global_step"] == 6


def test_keep_below_one_is_refused(run_args: list[str], refused: Refused) -> None:
    assert "checkpoint.keep is 0" in refused("fit", *run_args, "--checkpoint.keep", "0")
