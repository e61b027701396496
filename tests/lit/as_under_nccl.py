"""Fit, validate again, and `validate`, as under NCCL: `torchrun -m tests.lit.as_under_nccl OUT STRATEGY ARGS`.

Lightning validates under `no_grad` with gloo, and in `inference_mode` under NCCL.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch.loops import utilities
from torch import distributed

from lightning_sv.__main__ import main
from lightning_sv.runs.lock import find_last_checkpoint
from tests.lit.several_processes import CPU, STRATEGIES


def mapped_load(file: Any, *given: Any, **more: Any) -> Any:
    """Map checkpoint files, which no rank may copy to memory; DCP reads parts of open files."""
    assert more.get("mmap") or not isinstance(file, str | Path), file
    return load(file, *given, **more)


load = torch.load


def run(run_dir: Path, strategy: str, args: list[str]) -> None:
    """Rank 0 leaves the loss of the second validation in summary.json; `validate` prints it."""
    args = ["--config", str(STRATEGIES[strategy]), *CPU, *args, "--trainer.devices", os.environ["WORLD_SIZE"]]
    fit = ["fit", *args, "--run_dir", str(run_dir), "--ckpt_path", "last"]
    assert main(fit) == 0
    distributed.barrier()
    summary = run_dir / "summary.json"
    if os.environ["RANK"] == "0":
        before = json.loads(summary.read_text())["val_loss"]
        summary.unlink()  # as if killed after the last step
    distributed.barrier()
    assert main(fit) == 0
    if os.environ["RANK"] == "0":
        assert abs(json.loads(summary.read_text())["val_loss"] - before) < 1e-6
    if os.environ["WORLD_SIZE"] != "1":
        blind = os.environ["RANK"] != "0"  # as on a node that does not see the checkpoint yet
        seen = (lambda run_dir: None) if blind else find_last_checkpoint
        with patch("lightning_sv.lit.cli.find_last_checkpoint", seen):
            assert main([*fit, "--trainer.max_steps", "9", "--allow_lr_jump"]) == 2
    assert main(["validate", *args, "--ckpt_path", str(run_dir / "checkpoints/last.ckpt"), "--json"]) == 0


if __name__ == "__main__":
    # Lightning's loops ask for the backend here; collectives stay those of gloo.
    backend = patch.object(utilities, "dist", SimpleNamespace(get_backend=lambda: "nccl"))
    with backend, patch.object(torch, "load", mapped_load):
        run(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
