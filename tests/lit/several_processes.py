"""Fits of several models in one launch: `torchrun --nproc-per-node 2 -m tests.lit.several_processes OUT STRATEGY ARGS`.

Each model is trained whole, and once more with a stop in the middle, asked for by a signal to the last rank alone.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_sv.__main__ import main
from lightning_sv.lit.module import PretrainModule
from lightning_sv.nn import MixtureOfExperts

STEPS, STOP_AT, SEQ_LEN = 20, 10, 32
MUON = ["--model.optim.name", "muon", "--model.optim.ns_dtype", "float32"]
MIXTURE = ["--model.backbone.n_expert", "6", "--model.backbone.n_expert_active", "2"]
MODELS: dict[str, list[str]] = {
    "llama": ["--model.scale", "llama"],
    "unified": ["--model.scale", "unified"],
    "muon": ["--model.scale", "unified", *MUON],
    "moe": ["--model.scale", "hg+dp+or", *MIXTURE, "--model.backbone.router.balance_coef", "1.0"],
    "moe-muon": ["--model.scale", "unified", *MIXTURE, *MUON, "--model.backbone.router.balance", "bias"],
}
#: the strategies that are shipped, on a CPU
STRATEGIES = {"ddp": Path("conf/trainer/ddp.yaml"), "fsdp": Path("conf/trainer/fsdp.yaml")}
CPU = ["--trainer.accelerator", "cpu", "--trainer.precision", "32-true", "--model.compile", "none"]


def arguments(args: list[str], name: str) -> list[str]:
    """Of a fit of 20 steps with accumulation, clipping that bites, and an epoch of about nine steps."""
    args = [*args, *MODELS[name], "--model.optim.lr", "6e-3", "--trainer.max_steps", str(STEPS)]
    args += ["--data.global_batch", "256", "--data.val_sequences", "33", "--trainer.gradient_clip_val", "0.5"]
    return [*args, "--checkpoint.every_n_steps", "7", "--scalars.every_n_steps", "2", "--experts.every_n_steps", "4"]


def fixed_choice(self: MixtureOfExperts, probabilities: Tensor) -> Tensor:
    """Experts by position: rounding cannot move a token to another one."""
    position = torch.arange(len(probabilities), device=probabilities.device) % SEQ_LEN
    return torch.stack([(position * (i + 1) + i) % self.n_expert for i in range(self.n_active)], dim=-1)


def stop_here(self: PretrainModule, batch: Any, batch_idx: int) -> None:
    """Signal the last rank in the first micro-batch after step 10."""
    if self.global_step == STOP_AT and self.trainer.global_rank == self.trainer.world_size - 1:
        os.kill(os.getpid(), signal.SIGTERM)


def run(out: Path, strategy: str, args: list[str]) -> None:
    MixtureOfExperts._choose = fixed_choice
    for name in MODELS:
        fit = ["fit", *arguments(args, name), "--config", str(STRATEGIES[strategy]), *CPU, "--data.micro_batch", "64"]
        fit += ["--trainer.devices", os.environ["WORLD_SIZE"]]
        assert main([*fit, "--run_dir", str(out / name)]) == 0, name
        PretrainModule.on_train_batch_start = stop_here
        stopped = [*fit, "--run_dir", str(out / f"{name}-stopped"), "--ckpt_path", "last"]
        assert main(stopped) == 128 + signal.SIGTERM, name
        del PretrainModule.on_train_batch_start
        assert main(stopped) == 0, name


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
