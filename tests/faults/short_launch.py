"""A launch of seconds on two ranks: five steps of Muon under FSDP2, and the state gathered as for a checkpoint."""

import atexit
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh

from lightning_sv.lit.distributed import leave_group
from lightning_sv.lit.fsdp import shard
from lightning_sv.lit.module import PretrainModule
from lightning_sv.nn import BackboneConfig
from lightning_sv.optim import OptimConfig, build_optimizer

STEPS, VOCAB = 5, 64
#: matrices; experts too; products and Newton-Schulz in bf16, with the blocks run again in backward
RECIPES: dict[str, dict[str, Any]] = {
    "matrices": {"ns_dtype": "float32"},
    "experts": {"ns_dtype": "float32", "n_expert": 6, "n_expert_active": 2},
    "mixed": {"ns_dtype": "bfloat16"},
}


def train(ns_dtype: str, **sizes: int) -> None:
    distributed.init_process_group("gloo")
    atexit.register(leave_group)  # as the command does
    mixed = ns_dtype == "bfloat16"
    backbone = BackboneConfig(name="x", d_model=32, n_layer=2, n_head=2, vocab_size=VOCAB, **sizes)
    optim = OptimConfig(name="muon", lr=6e-3, ns_dtype=ns_dtype)
    module = PretrainModule(backbone, "unified", optim=optim, activation_checkpointing=mixed, seed=0)
    module._trainer = SimpleNamespace(world_size=2)  # all that a step asks it
    module._monitored = True  # and nothing to log to
    module.configure_model()
    shard(module.net, init_device_mesh("cpu", (2,)), torch.device("cpu"), seed=0)
    optimizer = build_optimizer(module.settings.parameter_groups(module.net), module.settings.optim, module.settings.lr)
    draw = torch.Generator().manual_seed(distributed.get_rank())
    for _ in range(STEPS):
        for micro_batch in range(2):
            block = torch.randint(VOCAB, (2, 33), generator=draw)
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                loss = module.training_step(block, micro_batch)["loss"]
            loss.backward()
        torch.nn.utils.clip_grad_norm_(module.net.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    get_optimizer_state_dict(module.net, optimizer, options=options)
    assert all(weight.isfinite().all() for weight in get_model_state_dict(module.net, options=options).values())


if __name__ == "__main__":
    train(**RECIPES[sys.argv[1]])
