"""A disk that is full: the last checkpoint stays whole, one sentence, exit code 1.

A limit on the size of files stands for it: the kernel refuses the write that would go beyond.
"""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest

from lightning_sv.__main__ import main
from lightning_sv.lit.checkpoint.callback import AtomicCheckpointIO
from tests.faults.conftest import Tally
from tests.lit.runs import LAST, differences, finish, load, start

pytestmark = pytest.mark.faults
SHORT = ["--checkpoint.every_n_steps", "3"]


def fit(args: list[str], run: Path, steps: int) -> list[str]:
    return ["fit", *args, *SHORT, "--trainer.max_steps", str(steps), "--run_dir", str(run)]


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.99])
def test_full_disk_keeps_the_last_checkpoint(share: float, run_args: list[str], tmp_path: Path, tally: Tally) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert main(fit(run_args, whole, 12)) == 0
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 3)
        assert main(fit(run_args, run, 12)) == 130
    checkpoint = run / LAST
    before, limit = checkpoint.read_bytes(), int(share * checkpoint.stat().st_size)

    def full() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    process = start([*run_args, *SHORT, "--ckpt_path", "last"], run, preexec_fn=full)
    code, output = finish(process)
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    told = code == 1 and len(errors) == 1 and "File too large" in errors[0] and "Traceback" not in output
    kept = checkpoint.read_bytes() == before and not list(run.glob("checkpoints/.*"))
    tally("a full disk (limit on file size)", told and kept, output)
    assert main([*fit(run_args, run, 12), "--ckpt_path", "last"]) == 0
    assert differences(load(whole), load(run)) == []


def stop_after(patch: pytest.MonkeyPatch, step: int) -> None:
    """Interrupt the run as soon as the checkpoint of `step` is written."""
    save = AtomicCheckpointIO.save_checkpoint

    def stop(self: AtomicCheckpointIO, checkpoint: dict, path: object, **more: object) -> None:
        save(self, checkpoint, path)
        if checkpoint["global_step"] == step:
            raise KeyboardInterrupt

    patch.setattr(AtomicCheckpointIO, "save_checkpoint", stop)
