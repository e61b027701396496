"""Sharding of a backbone with FSDP2: which modules are gathered together."""

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from lightning_sv.nn import Backbone
from lightning_sv.nn.init import init_weights


def shard(
    backbone: Backbone,
    mesh: DeviceMesh,
    device: torch.device,
    *,
    seed: int,
) -> None:
    """Shard parameters, gradients and optimizer state over the devices of `mesh`.

    A block is gathered when it runs and freed after; embedding and head are kept through backward.
    Parameters are gathered and gradients reduced in float32: autocast casts the inputs of a
    product, as on one device, so a scale vector near 1 keeps its digits (bf16 spacing there is 0.4
    to 0.8%).

    Args:
        backbone: model on the meta device, which is initialized from `seed`, one block at a time;
            or one with weights, of which those of rank 0 are used
        mesh: all devices, in one dimension
        device: device of this rank
        seed: seed of the initialization
    """
    for index, layer in enumerate(backbone.layers):
        _materialize(layer, f"layers.{index}.", backbone, device, seed)
        fully_shard(layer, mesh=mesh)
    _materialize(backbone.embed, "embed.", backbone, device, seed)
    _materialize(backbone.head, "head.", backbone, device, seed)
    fully_shard(backbone, mesh=mesh)


def _materialize(
    part: nn.Module, prefix: str, backbone: Backbone, device: torch.device, seed: int
) -> None:
    """Give a part of the backbone its weights on the device."""
    if next(part.parameters()).is_meta:
        part.to_empty(device=device)
        for buffer in part.buffers():  # the experts' biases
            buffer.zero_()
        init_weights(part, backbone.config, seed, prefix=prefix)
        return
    part.to(device)
    for tensor in (*part.parameters(), *part.buffers()):
        distributed.broadcast(tensor.data, 0)
