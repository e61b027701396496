"""Fits of several models in one launch: `torchrun -m tests.lit.several_processes OUT STRATEGY
CHECKPOINT ARGS`.

Some are stopped in the middle, by a signal to the last rank alone, and resumed. One goes on from a
checkpoint of one process.
"""

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from lightning_sv.__main__ import main
from lightning_sv.lit.module import PretrainModule
from lightning_sv.lit.signals import STOPPED
from lightning_sv.nn import MixtureOfExperts
from lightning_sv.optim.groups import clip_by_role
from lightning_sv.scale import ScaleVector
from tests.conftest import argv

STEPS = 8
STOP_AT = 3
SEQ_LEN = 32
MUON = "--model.optim.name muon --model.optim.ns_dtype float32"
MIXTURE = "--model.backbone.n_expert 6 --model.backbone.n_expert_active 2"
MODELS = {
    "unified": argv("--model.scale unified --config tests/lit/probes.yaml"),
    "muon": argv(f"--model.scale unified {MUON}"),
    "moe": argv(f"--model.scale hg+dp+or {MIXTURE} --model.backbone.router.balance_coef 1.0"),
    "moe-muon": argv(
        f"--model.scale unified {MIXTURE} {MUON} --model.backbone.router.balance bias"
    ),
    # as shipped but for the compiler, Newton-Schulz in bf16 included
    "mixed": argv(
        "--model.scale unified --trainer.precision bf16-mixed"
        " --model.activation_checkpointing true --model.optim.name muon --samples.tokens 2"
    ),
}
STOPPED_ONCE = ("unified", "moe-muon")
CLIPPED_ALONE = "moe-muon"
#: continues the run of one process
MOVED = "muon"
#: the strategies that are shipped, on a CPU
STRATEGIES = {"ddp": Path("conf/trainer/ddp.yaml"), "fsdp": Path("conf/trainer/fsdp.yaml")}
SHARDED = argv("--trainer.strategy.init_args.save_distributed_checkpoint true")
CPU = argv("--trainer.accelerator cpu --trainer.precision 32-true --model.compile none")


def arguments(args: list[str], name: str) -> list[str]:
    """Return the arguments of a fit of 8 steps with clipping that bites, in epochs of 5 steps."""
    words = (
        f"--trainer.max_steps {STEPS} --checkpoint.every_n_steps {STOP_AT + 1}"
        " --model.optim.lr 6e-3 --data.global_batch 32 --data.val_sequences 33 --trainer.gradient_clip_val 0.5"
        " --scalars.every_n_steps 2 --experts.every_n_steps 4"
    )
    return [*args, *MODELS[name], *argv(words)]


def fixed_choice(self: MixtureOfExperts, probabilities: Tensor) -> Tensor:
    """Choose experts by position, so that rounding cannot move a token."""
    position = torch.arange(len(probabilities), device=probabilities.device) % SEQ_LEN
    return torch.stack(
        [(position * (i + 1) + i) % self.n_expert for i in range(self.n_active)], dim=-1
    )


def stop_here(self: PretrainModule, batch: Any, batch_idx: int) -> None:
    """Signal the last rank in the first micro-batch of the next step."""
    if self.global_step == STOP_AT and self.trainer.global_rank == self.trainer.world_size - 1:
        os.kill(os.getpid(), signal.SIGTERM)


def clip_alone(
    self: PretrainModule, optimizer: Any, gradient_clip_val: float, **others: Any
) -> None:
    """Clip like a subclass that does not call super()."""
    clip_by_role(self.parameters(), optimizer, gradient_clip_val, {})


def stop_in_the_middle(fit: list[str], run_dir: Path, clip: Any) -> None:
    """Train until the signal; copy the checkpoint to stopped.ckpt."""
    with (
        patch.object(PretrainModule, "on_train_batch_start", stop_here),
        patch.object(PretrainModule, "configure_gradient_clipping", clip),
    ):
        assert main([*fit, "--run_dir", str(run_dir), "--ckpt_path", "last"]) == STOPPED
    if os.environ.get("RANK", "0") == "0":
        shutil.copy(run_dir / "checkpoints/last.ckpt", run_dir / "stopped.ckpt")


@torch.no_grad()
def scale_vectors_keep_their_digits(module: PretrainModule) -> None:
    """gamma = 1 + 1e-3 changes the logits, which it would not if it were gathered in bf16 (spacing
    4e-3 to 8e-3)."""
    tokens = torch.arange(SEQ_LEN, device=module.device).unsqueeze(0)
    before = module.net(tokens).float()
    vectors = [each for each in module.net.modules() if isinstance(each, ScaleVector)]
    for sign in (1, -1):
        for vector in vectors:
            for parameter in vector.parameters(recurse=False):
                parameter.add_(sign * 1e-3)
        if sign == 1:
            assert not torch.equal(module.net(tokens).float(), before)


def the_table_is_what_is_trained(module: PretrainModule) -> None:
    """The printed groups come from `meta()`: the sharded optimizer has the same groups and sizes."""
    optimizer = module.trainer.optimizers[0]
    here = [[tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups]
    made = module.settings
    planned = made.plan.optimizer(made.plan.meta())
    assert here == [[tuple(p.shape) for p in group["params"]] for group in planned.param_groups]
    for key in ("weight_decay", "initial_lr"):
        assert [g[key] for g in optimizer.param_groups] == [
            g.get(key, g["lr"]) for g in planned.param_groups
        ]


def run(out: Path, strategy: str, moved: str, args: list[str]) -> None:
    MixtureOfExperts._choose = fixed_choice
    devices = f"--data.micro_batch 8 --trainer.devices {os.environ['WORLD_SIZE']}"
    for name in MODELS:
        fit = ["fit", "--config", str(STRATEGIES[strategy]), *CPU, *arguments(args, name)]
        fit += argv(devices)
        if name in STOPPED_ONCE:
            clip: Any = PretrainModule.configure_gradient_clipping
            if name == CLIPPED_ALONE:
                clip = clip_alone
            stop_in_the_middle(fit, out / name, clip)
        checkpoint = moved if name == MOVED else "last"
        assert main([*fit, "--run_dir", str(out / name), "--ckpt_path", checkpoint]) == 0, name


if __name__ == "__main__":
    start = PretrainModule.on_train_start

    def checked_start(self: PretrainModule) -> None:
        start(self)
        the_table_is_what_is_trained(self)
        if self.trainer.precision == "bf16-mixed":
            with self.trainer.precision_plugin.forward_context():
                scale_vectors_keep_their_digits(self)

    PretrainModule.on_train_start = checked_start
    run(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
