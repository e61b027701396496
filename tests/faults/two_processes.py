"""Faults of one process of two: `torchrun --nproc-per-node 2 -m tests.faults.two_processes OUT
ARGS`.

Rank 0 prints one JSON line with what each fault came to; a rank that is left waiting ends the
launch by its time limit.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sv.__main__ import main
from lightning_sv.lit.module import PretrainModule
from lightning_sv.runs.directory import read_summary
from tests.conftest import argv
from tests.faults.test_nonfinite import Injection
from tests.lit.runs import events, load

STEPS = 4
STEP = 1
RANK = int(os.environ.get("RANK", "0"))
LAST_RANK = int(os.environ.get("WORLD_SIZE", "1")) - 1 == RANK


def signal_to_the_last_rank(module: PretrainModule, batch: Any, batch_idx: int) -> None:
    if LAST_RANK and module.global_step == STEP:
        os.kill(os.getpid(), signal.SIGUSR1)


def nan_loss(out: Path, fit: list[str]) -> bool:
    """A loss of the last rank is NaN; its step is noted, and the run stops."""
    run = out / "nan"
    with pytest.MonkeyPatch.context() as patch:
        Injection(patch, "nan loss", {STEP} if LAST_RANK else set())
        code = main([*fit, "--run_dir", str(run)])
    if code != 1 or RANK:
        return code == 1
    (event,) = events(run)
    n_losses = len(event["losses"])
    is_half = event["losses"].count("nan") == n_losses // 2 > 0
    return event["step"] == STEP and is_half and not (run / "summary.json").exists()


def requeued(out: Path, fit: list[str]) -> bool:
    """The last rank gets SIGUSR1 in a job of SLURM; the job is requeued after the step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            PretrainModule, "on_train_batch_start", signal_to_the_last_rank, raising=False
        )
        patch.setenv("SLURM_JOB_ID", "12")
        patch.setenv("PATH", str(out), prepend=os.pathsep)  # a scontrol of the test's
        code = main([*fit, "--run_dir", str(out / "signal")])
    if code or RANK:
        return code == 0
    is_requeued = (out / "asked").read_text() == "requeue 12\n"
    return is_requeued and load(out / "signal")["global_step"] == STEP + 1


def killed_after_the_last_step(out: Path, fit: list[str]) -> bool:
    """The run of the signal is finished, loses its summary, and gets the same one again."""
    again = [*fit, "--run_dir", str(out / "signal"), "--ckpt_path", "last"]
    assert main(again) == 0
    torch.distributed.barrier()
    if RANK:
        return main(again) == 0
    before = read_summary(out / "signal")
    (out / "signal/summary.json").unlink()
    assert main(again) == 0
    loss = read_summary(out / "signal")["val_loss"]
    return loss == pytest.approx(before["val_loss"], rel=1e-5)


def run(out: Path, args: list[str]) -> dict[str, bool]:
    words = (
        "fit --config conf/trainer/ddp.yaml --trainer.accelerator cpu --trainer.precision 32-true"
    )
    more = f"--model.compile none --trainer.devices 2 --trainer.max_steps {STEPS}"
    fit = [*argv(words), *args, *argv(more)]
    return {
        "nan loss on one of two devices, stop": nan_loss(out, fit),
        "SIGUSR1 to one of two devices, requeued by SLURM": requeued(out, fit),
        "killed after the last step on two devices": killed_after_the_last_step(out, fit),
    }


if __name__ == "__main__":
    result = run(Path(sys.argv[1]), sys.argv[2:])
    every: list[Any] = [None, None]
    torch.distributed.all_gather_object(every, result)
    if RANK == 0:
        print(json.dumps({name: all(each[name] for each in every) for name in result}))
