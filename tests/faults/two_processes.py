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


def run(out: Path, args: list[str]) -> dict[str, bool]:
    fit = argv(
        "fit --config conf/trainer/ddp.yaml --trainer.accelerator cpu --trainer.precision 32-true"
    )
    fit += [
        "--model.compile",
        "none",
        *args,
        *argv(f"--trainer.devices 2 --trainer.max_steps {STEPS}"),
    ]
    found = {}
    for how in ("stop", "skip"):
        with pytest.MonkeyPatch.context() as patch:
            Injection(patch, "nan loss", {STEP} if LAST_RANK else set())
            code = main([*fit, "--model.nonfinite", how, "--run_dir", str(out / how)])
        fine = code == (1 if how == "stop" else 0)
        if RANK == 0:
            (event,) = events(out / how)
            fine &= (
                event["step"] == STEP
                and event["losses"].count("nan") == len(event["losses"]) // 2 > 0
            )
            fine &= (out / how / "summary.json").exists() == (how == "skip")
        found[f"nan loss on one of two devices, {how}"] = fine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            PretrainModule, "on_train_batch_start", signal_to_the_last_rank, raising=False
        )
        patch.setenv("SLURM_JOB_ID", "12")
        patch.setenv("PATH", str(out), prepend=os.pathsep)  # a scontrol of the test's
        code = main([*fit, "--run_dir", str(out / "signal")])
    fine = code == 0
    if RANK == 0:
        fine &= (out / "asked").read_text() == "requeue 12\n" and load(out / "signal")[
            "global_step"
        ] == STEP + 1
    found["SIGUSR1 to one of two devices, requeued by SLURM"] = fine
    again = [*fit, "--run_dir", str(out / "signal"), "--ckpt_path", "last"]
    assert main(again) == 0
    summary = out / "signal/summary.json"
    before = json.loads(summary.read_text())["val_loss"] if RANK == 0 else 0.0
    torch.distributed.barrier()
    if RANK == 0:
        summary.unlink()
    fine = main(again) == 0
    if RANK == 0:
        fine &= json.loads(summary.read_text())["val_loss"] == pytest.approx(before, rel=1e-5)
    found["killed after the last step on two devices"] = fine
    return found


if __name__ == "__main__":
    result = run(Path(sys.argv[1]), sys.argv[2:])
    every: list[Any] = [None, None]
    torch.distributed.all_gather_object(every, result)
    if RANK == 0:
        print(json.dumps({name: all(each[name] for each in every) for name in result}))
