"""Fully sharded data parallelism (FSDP2): which modules are gathered together, and checkpoints as one file."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from lightning_sv.nn import Backbone

_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def shard(backbone: Backbone, mesh: DeviceMesh, *, keep_gathered: bool = False) -> None:
    """Shard parameters, gradients and optimizer state over the devices of `mesh`, along their first axis.

    A block is gathered when it runs and freed after; embedding and head are kept through backward.
    Parameters are gathered and gradients reduced in float32: autocast casts what a product needs, as
    on one device, so a scale vector near 1 keeps its digits (bf16 spacing there is 0.4 to 0.8%).

    Args:
        backbone: all of it on one device
        mesh: of one dimension
        keep_gathered: a block is freed in backward alone
    """
    after_forward = not keep_gathered
    for layer in backbone.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=after_forward)
    fully_shard(backbone, mesh=mesh)


class FullyShardedStrategy(ModelParallelStrategy):
    """Lightning's FSDP2 strategy over all devices of all nodes, with the checkpoints of every other strategy.

    Lightning's own numbers the optimizer's states in the order of the model, torch in the order of the
    parameter groups. Here it is torch's, so that a run moves between one device, DDP and FSDP2.

    Args:
        process_group_backend: of torch.distributed; null for the device's default
        keep_gathered: weights are gathered once a step instead of twice in each of its micro-batches, for 4 bytes a
            parameter, which `plan` counts
    """

    def __init__(self, process_group_backend: str | None = None, keep_gathered: bool = False):
        super().__init__(
            tensor_parallel_size=1, save_distributed_checkpoint=False, process_group_backend=process_group_backend
        )
        self.keep_gathered = keep_gathered

    def setup_environment(self) -> None:
        """Shard over every device; Lightning's "auto" is tensor parallelism inside a node."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """In all micro-batches of a step but the last: keep their gradients whole on every device, and reduce none.

        Lightning's own knows DDP alone. Reducing each costs a step as many times the traffic as it has micro-batches;
        keeping them costs 4 bytes a parameter, which `plan` counts. So it is with the weights, where `keep_gathered`.
        """
        backbone: Any = self.lightning_module.net  # type: ignore[union-attr]
        backbone.set_requires_gradient_sync(False)
        backbone.set_reshard_after_backward(not self.keep_gathered)
        try:
            yield
        finally:
            backbone.set_requires_gradient_sync(True)
            backbone.set_reshard_after_backward(True)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Gather the state on rank 0, as torch's own `state_dict` would be; empty on the others."""
        assert self.model is not None
        optimizer = getattr(optimizer, "_optimizer", optimizer)  # Lightning wraps it
        named: dict[str, Any] = get_optimizer_state_dict(self.model, optimizer, options=_FULL)
        if not named.get("param_groups"):
            return {}
        number = {name: i for i, name in enumerate(chain.from_iterable(g["params"] for g in named["param_groups"]))}
        return {
            "state": {number[name]: state for name, state in named["state"].items()},
            "param_groups": [g | {"params": [number[name] for name in g["params"]]} for g in named["param_groups"]],
        }

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load weights and optimizer states of a checkpoint file into the shards; return the rest.

        Raises:
            ConfigError: the checkpoint was made under other settings, see `PretrainModule.check_settings`
        """
        assert self.model is not None
        module: Any = self.lightning_module
        checkpoint: dict[str, Any] = torch.load(checkpoint_path, map_location="cpu", mmap=True, weights_only=True)
        module.check_settings(checkpoint)
        set_model_state_dict(self.model, checkpoint["state_dict"], options=_FULL)
        for optimizer, saved in zip(self.optimizers, checkpoint.get("optimizer_states", ()), strict=False):
            names = {id(parameter): name for name, parameter in module.named_parameters()}
            here = (names[id(p)] for group in optimizer.param_groups for p in group["params"])
            name = dict(zip(chain.from_iterable(g["params"] for g in saved["param_groups"]), here, strict=True))
            named: dict[str, Any] = {
                "state": {name[i]: state for i, state in saved["state"].items()},
                "param_groups": [g | {"params": [name[i] for i in g["params"]]} for g in saved["param_groups"]],
            }
            set_optimizer_state_dict(self.model, optimizer, named, options=_FULL)
        return checkpoint
