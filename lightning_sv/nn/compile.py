"""What of a backbone is compiled, and how."""

from typing import Literal

import torch

from lightning_sv.nn.backbone import Backbone

CompileMode = Literal["none", "model", "block"]
#: Inductor keeps cheap passes fused into their readers rather than store their float32 results (2.11 and 2.13)
INDUCTOR = {"realize_reads_threshold": 16, "realize_opcount_threshold": 200, "realize_acc_reads_threshold": 32}


def prepare_compiler() -> None:
    """Set what holds for everything that this process compiles."""
    torch._dynamo.config.optimize_ddp = False
    for key, value in INDUCTOR.items():
        setattr(torch._inductor.config, key, value)


def compile_backbone(net: Backbone, how: CompileMode) -> None:
    """Compile in place, so that the keys of the state stay: nothing, the whole model, or each block and the head apart.

    By block one compilation serves all blocks, and hooks around them stay. Blocks are graphs of their own, between
    which DDP's hooks run: dynamo need not cut them at DDP's buckets again.
    """
    if how == "none":
        return
    prepare_compiler()
    if how == "model":
        net.compile()
        return
    for module in (*net.layers, net.head):
        module.forward = torch.compile(module.forward, dynamic=False)
