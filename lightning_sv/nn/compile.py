"""Compilation of a backbone."""

from typing import Any, Literal

import torch

from lightning_sv.nn.backbone import Backbone

CompileMode = Literal["none", "model", "block"]
#: Let Inductor recompute cheap operations in their consumers instead of storing float32 results (torch 2.11 and 2.13).
INDUCTOR: dict[str, Any] = {
    "realize_reads_threshold": 16,
    "realize_opcount_threshold": 200,
    "realize_acc_reads_threshold": 32,
}


def compile_backbone(net: Backbone, how: CompileMode) -> None:
    """Compile in place, without changing state-dict keys: nothing, the model, or each block and the head.

    With `block`, one compilation serves all blocks and hooks on blocks still run. DDP's hooks run between these graphs,
    so dynamo does not need to split them at DDP's buckets.
    """
    if how == "none":
        return
    torch._dynamo.config.optimize_ddp = False
    if how == "model":
        net.compile(options=INDUCTOR)
        return
    for module in (*net.layers, net.head):
        module.forward = torch.compile(module.forward, dynamic=False, options=INDUCTOR)
