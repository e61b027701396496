"""A fit under hybrid sharding with sharded checkpoints: `torchrun -m tests.lit.sharded_checkpoints DIE_AT ARGS`."""

import os
import signal
import sys
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lightning_sv import Backbone
from lightning_sv.__main__ import main
from lightning_sv.lit.module import PretrainModule


def check_init(self: PretrainModule) -> None:
    """Sharded initialization is the whole one, bit for bit."""
    made = self.settings
    whole = Backbone(made.backbone, made.strategy, made.scale_options, seed=made.seed or torch.initial_seed())
    sharded = self.net.state_dict()
    for name, value in whole.state_dict().items():
        here = sharded[name]
        assert torch.equal(here.full_tensor() if isinstance(here, DTensor) else here, value), name


def die(self: PretrainModule, batch: Any, batch_idx: int) -> None:
    if self.global_step == DIE_AT and self.global_rank == self.trainer.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    DIE_AT = int(sys.argv[1])
    start = PretrainModule.on_train_start

    def checked_start(self: PretrainModule) -> None:
        start(self)
        if self.global_step == 0:
            check_init(self)

    PretrainModule.on_train_start = checked_start
    if DIE_AT >= 0:
        PretrainModule.on_train_batch_start = die
    sys.exit(main(["fit", *sys.argv[2:]]))
