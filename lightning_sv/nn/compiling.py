"""What of a backbone is compiled, and how."""

from typing import Any, Literal

import torch

from lightning_sv.nn.backbone import Backbone

How = Literal["none", "model", "block"]
#: Inductor keeps cheap passes fused into their readers rather than store their float32 results (2.11 and 2.13)
INDUCTOR: dict[str, Any] = {
    "realize_reads_threshold": 16,
    "realize_opcount_threshold": 200,
    "realize_acc_reads_threshold": 32,
}


def compile_backbone(net: Backbone, how: How) -> None:
    """Compile in place, so that the keys of the state stay: nothing, the whole model, or each block and the head apart.

    By block one compilation serves all blocks, and hooks around them stay. Blocks are graphs of their own, between
    which DDP's hooks run: dynamo need not cut them at DDP's buckets again.
    """
    if how == "none":
        return
    torch._dynamo.config.optimize_ddp = False
    if how == "model":
        net.compile(options=INDUCTOR)
        return
    for module in (*net.layers, net.head):
        module.forward = torch.compile(module.forward, dynamic=False, options=INDUCTOR)
