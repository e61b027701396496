"""A run killed at step k and resumed is the run that was never stopped, bit for bit."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_sv.__main__ import main
from lightning_sv.lit.checkpoint import AtomicCheckpointIO
from lightning_sv.lit.module import PretrainModule
from lightning_sv.paper.events import read_run
from tests.conftest import write_run_args
from tests.lit.runs import same_checkpoint, start, wait_for

STEPS = 40


@pytest.fixture
def long_args(short_corpus: Path, tmp_path: Path) -> list[str]:
    # 96 sequences a step, a twelfth of a second: the corpus holds one or two steps, so the run crosses many epochs.
    return [
        *write_run_args(short_corpus, tmp_path),
        "--trainer.max_steps", str(STEPS), "--data.global_batch", "96", "--data.micro_batch", "48",
        "--checkpoint.every_n_steps", "5", "--scalars.every_n_steps", "4", "--data.validations", "8",
        "--progress.lines", str(STEPS),
    ]  # fmt: skip


@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted(long_args: list[str], tmp_path: Path) -> None:
    long_args = [*long_args, "--model.optim.name", "muon", "--model.optim.lr", "6e-3"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main(["fit", *long_args, "--run_dir", str(whole)]) == 0
    for stop_at in (11, 32):
        resume = ["--ckpt_path", str(killed / "checkpoints/last.ckpt")] if killed.exists() else []
        process = start([*long_args, *resume], killed)
        wait_for(process, f"step {stop_at}/{STEPS}")
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (killed / "summary.json").exists()
    checkpoint = str(killed / "checkpoints/last.ckpt")
    assert main(["fit", "--config", str(killed / "config.yaml"), "--ckpt_path", checkpoint]) == 0
    a, b = read_run(whole), read_run(killed)
    for tag in ("train/loss", "lr", "grad_norm", "val/loss"):
        assert b.curve(tag).tokens.tolist() == a.curve(tag).tokens.tolist(), tag
        assert b.curve(tag).values.tolist() == a.curve(tag).values.tolist(), tag
    assert len(a.curve("train/loss").tokens) == STEPS // 4 and len(a.curve("val/loss").tokens) == 8
    assert same_checkpoint(whole, killed)["loops"]["fit_loop"]["epoch_progress"]["current"]["started"] > 2


MIXTURE = {"n_expert": 6, "n_expert_active": 2}
RECIPES = {
    "moe": (MIXTURE, "unified", "adamw", "cos"),
    "moe-bias": (MIXTURE | {"router.balance": "bias"}, "hg+dp+or", "muon", "wsd"),
    "gemma": ({"qk_norm": True, "post_norm": True}, "iwd+offset", "muon", "cos"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_every_family_resumes_bit_for_bit(
    name: str, run_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone, scale, optim, schedule = RECIPES[name]
    args = [*run_args, "--model.scale", scale, "--model.optim.name", optim, "--model.optim.lr", "6e-3"]
    args += ["--model.schedule.name", schedule, "--trainer.max_steps", "20", "--data.micro_batch", "2"]
    args += ["--checkpoint.every_n_steps", "10", "--experts.every_n_steps", "8", "--data.validations", "2"]
    args += [word for key, value in backbone.items() for word in (f"--model.backbone.{key}", str(value).lower())]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert main(["fit", *args, "--run_dir", str(whole)]) == 0

    def stop(self: PretrainModule, batch: object, batch_idx: int) -> None:
        if self.global_step == 13:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PretrainModule, "on_train_batch_start", stop)
        with pytest.raises(SystemExit):
            main(["fit", *args, "--run_dir", str(stopped)])
    assert not (stopped / "summary.json").exists()
    assert main(["fit", *args, "--ckpt_path", str(stopped / "checkpoints/last.ckpt")]) == 0
    same_checkpoint(whole, stopped)
    a, b = read_run(whole), read_run(stopped)
    assert a.curves.keys() == b.curves.keys()
    routed = [tag for tag in a.curves if tag.startswith("moe/")]
    assert len(routed) == (2 * (6 + 5) + 3 if name.startswith("moe") else 0)
    for tag in ("train/loss", "val/loss", "branch_norm/mean/q_proj/effective", *routed):
        assert b.curve(tag).tokens.tolist() == a.curve(tag).tokens.tolist(), tag
        assert b.curve(tag).values.tolist() == a.curve(tag).values.tolist(), tag


@pytest.mark.slow
def test_ctrl_c_leaves_the_last_checkpoint_whole(long_args: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(long_args, run)
    wait_for(process, f"step 9/{STEPS}")
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode not in (0, None) and "Traceback" not in output, output
    assert torch.load(run / "checkpoints/last.ckpt", weights_only=True)["global_step"] >= 5
    assert main(["fit", *long_args, "--ckpt_path", str(run / "checkpoints/last.ckpt")]) == 0
    assert len(read_run(run).curve("train/loss").tokens) == STEPS // 4


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    class Unwritable:
        def __reduce__(self):
            raise OSError(28, "No space left on device")

    io, path = AtomicCheckpointIO(), tmp_path / "last.ckpt"
    io.save_checkpoint({"step": 1}, path)
    with pytest.raises(OSError, match="No space left"):
        io.save_checkpoint({"step": 2, "bad": Unwritable()}, path)
    assert torch.load(path, weights_only=True) == {"step": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.slow
def test_two_processes_share_batch_run_directory_and_validation(
    run_args: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    two = ["--trainer.devices", "2", "--trainer.strategy", "ddp"]
    process = subprocess.run([sys.executable, "-m", "lightning_sv", "fit", *run_args, *two], timeout=600, check=False)
    assert process.returncode == 0, capfd.readouterr()
    (run,) = (tmp_path / "runs/tiny").iterdir()
    assert read_run(run).curve("train/loss").tokens.tolist() == [128 * step for step in range(1, 13)]
    assert json.loads((run / "summary.json").read_text())["tokens"] == 12 * 128
    checkpoint = ["--ckpt_path", str(run / "checkpoints/last.ckpt"), "--json", "true"]
    capfd.readouterr()
    assert main(["validate", *run_args, *checkpoint]) == 0
    one_device = json.loads(capfd.readouterr().out)["val_loss"]
    # float32 losses of other batches: a mean over 300 logits each, and its sums
    assert one_device == pytest.approx(read_run(run).val_loss, rel=1e-5)
