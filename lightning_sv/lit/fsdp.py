"""Fully sharded data parallelism (FSDP2): which modules are gathered together, and checkpoints."""

import errno
import logging
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_sv.atomic import partial_of, remove, replace, sync
from lightning_sv.errors import expect
from lightning_sv.lit.checkpoint.compat import check_recorded
from lightning_sv.lit.checkpoint.sharded_writer import ChecksummedWriter
from lightning_sv.nn import Backbone
from lightning_sv.nn.init import init_weights
from lightning_sv.runs.sharded_checkpoint import (
    GROUPS,
    META,
    flat_tensors,
    is_sharded,
    number_parameters,
    read_sharded,
)

log = logging.getLogger(__name__)

_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
_SHARDED = StateDictOptions(full_state_dict=False)


def shard(
    backbone: Backbone,
    mesh: DeviceMesh,
    device: torch.device,
    *,
    seed: int,
    keep_gathered: bool = False,
) -> None:
    """Shard parameters, gradients and optimizer state over the devices of `mesh`, along their first axis.

    A block is gathered when it runs and freed after; embedding and head are kept through backward.
    Parameters are gathered and gradients reduced in float32: autocast casts the inputs of a
    product, as on one device, so a scale vector near 1 keeps its digits (bf16 spacing there is 0.4
    to 0.8%). A backbone on the meta device is initialized from `seed`, one block at a time;
    otherwise the weights of rank 0 are used. `mesh` has one dimension, or two, replicas x shards
    (hybrid sharding). `keep_gathered` frees a block in backward alone.
    """
    blocks = {f"layers.{index}.": layer for index, layer in enumerate(backbone.layers)}
    for prefix, part in {**blocks, "embed.": backbone.embed, "head.": backbone.head}.items():
        if next(part.parameters()).is_meta:
            part.to_empty(device=device)
            for buffer in part.buffers():  # the experts' biases
                buffer.zero_()
            init_weights(part, backbone.config, seed, prefix=prefix)
        else:
            part.to(device)
            for tensor in (*part.parameters(), *part.buffers()):
                distributed.broadcast(tensor.data, 0)
        if prefix in blocks:
            fully_shard(part, mesh=mesh, reshard_after_forward=not keep_gathered)
    fully_shard(backbone, mesh=mesh)


class FullyShardedStrategy(ModelParallelStrategy):
    """Lightning's FSDP2 strategy over all devices of all nodes.

    It reads the checkpoints of every other strategy, and writes them too, unless
    `save_distributed_checkpoint`. Lightning's own strategy numbers the optimizer's states in the
    order of the model, torch in the order of the parameter groups. Here it is torch's, so that a
    run moves between one device, DDP and FSDP2.

    Args:
        process_group_backend: backend of torch.distributed; null for the device's default
        keep_gathered: if True, weights are gathered once per step instead of twice in each of its
            micro-batches, for 4 bytes per parameter, which `plan` counts
        replicas: number of copies of the model (hybrid sharding, HSDP). Each is sharded over
            devices / replicas devices, and gradients are averaged over the copies
        save_distributed_checkpoint: if True, each rank writes its shard while training goes on. A
            checkpoint is a folder (`lightning_sv.runs.sharded_checkpoint`), which resumes on every
            number of devices. To resume under a different strategy, your own Trainer needs the
            plugin `lit.checkpoint.atomic_io.AtomicCheckpointIO`
        timeout: longest time that a rank waits for the others; null for ten minutes in the command
            line, else torch's
    """

    def __init__(
        self,
        process_group_backend: str | None = None,
        keep_gathered: bool = False,
        replicas: int = 1,
        save_distributed_checkpoint: bool = False,
        timeout: timedelta | None = None,
    ):
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout or default_pg_timeout,
        )
        self.keep_gathered, self.replicas = keep_gathered, replicas
        self.sharded_checkpoints = save_distributed_checkpoint
        self._write: tuple[Path, Future[Any]] | None = None
        self._write_group: distributed.ProcessGroup | None = None
        self._failed = self._ended = False

    def check_replicas(self) -> int:
        """Return the number of devices, which the number of replicas must divide."""
        devices = self.num_nodes * self.num_processes
        divides = self.replicas >= 1 and devices % self.replicas == 0
        wanted = f"a divisor of {devices}, the number of devices."
        expect(divides, "trainer.strategy.init_args.replicas", self.replicas, wanted)
        return devices

    def setup_environment(self) -> None:
        """Make the mesh of all devices; Lightning's "auto" is tensor parallelism inside a node."""
        for callback in self.lightning_module.trainer.callbacks:  # type: ignore[union-attr]
            copies = isinstance(callback, WeightAveraging)
            wanted = "none that copies the model, because sharded weights cannot be copied."
            expect(not copies, "a callback", type(callback).__name__, wanted)
        self._failed = self._ended = False
        devices = self._data_parallel_size = self.check_replicas()
        super().setup_environment()
        self.mesh = self.device_mesh["data_parallel"]
        if self.replicas > 1:
            sizes = self.replicas, devices // self.replicas
            self.mesh = init_device_mesh(
                self.root_device.type, sizes, mesh_dim_names=("replicate", "shard")
            )

    def setup(self, trainer: Trainer) -> None:
        """Refuse to fit a model with weights that are not sharded: each device would train its own."""
        trained = ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)  # type: ignore[union-attr]
        unsharded = next((name for name, p in trained if not isinstance(p, DTensor)), None)
        found = f"{type(self).__name__}, and the weight {unsharded} is not sharded"
        wanted = "weights that configure_model shards, as that of PretrainModule does with its backbone. Use ddp."
        expect(
            unsharded is None or trainer.state.fn != TrainerFn.FITTING,
            "trainer.strategy",
            found,
            wanted,
        )
        super().setup(trainer)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keep complete gradients on every device in all micro-batches of a step but the last, without reduction.

        Lightning's own method supports DDP only. Reducing in each micro-batch multiplies the
        traffic of a step by their number; complete gradients cost 4 bytes per parameter, which
        `plan` counts. With `keep_gathered` the same holds for the weights.
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
        """Gather the state on rank 0, as torch's own `state_dict` would be; empty on the others.

        With `save_distributed_checkpoint`, the shards of this rank under the names of the
        parameters.
        """
        assert self.model is not None
        optimizer = getattr(optimizer, "_optimizer", optimizer)  # Lightning wraps it
        options = _SHARDED if self.sharded_checkpoints else _FULL
        fresh = not optimizer.state
        named: dict[str, Any] = get_optimizer_state_dict(self.model, optimizer, options=options)
        if fresh:  # torch has filled the state by a step without gradients, which would count
            optimizer.state.clear()
            named = named and named | {"state": {}}  # only rank 0 may have it
        if self.sharded_checkpoints:
            return named
        return number_parameters(named) if named.get("param_groups") else {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint file; or copy the shards to host memory and write them in a thread, see `finish_write`."""
        if not self.sharded_checkpoints:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        self.finish_write()
        path = Path(self.broadcast(str(filepath)))
        optimizers = checkpoint.pop("optimizer_states", [])
        tensors = flat_tensors(checkpoint.pop("state_dict"), optimizers)
        if self.is_global_zero:
            remove(partial_of(path))  # left by a process that was killed
            partial_of(path).mkdir(parents=True)
            groups = [optimizer["param_groups"] for optimizer in optimizers]
            torch.save(checkpoint | {GROUPS: groups}, partial_of(path) / META)
            sync(partial_of(path) / META)
        self.barrier()
        if (
            self._write_group is None
        ):  # used by the writing thread only, because NCCL cannot send host memory
            self._write_group = distributed.new_group(backend="gloo")
        writer = ChecksummedWriter(partial_of(path))
        future: Any = async_save(tensors, storage_writer=writer, process_group=self._write_group)
        self._write = path, future
        if self._ended:  # saved after a fit
            self.finish_write()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Give a sharded checkpoint its name if the ranks have written it by now."""
        self.finish_write(wait=False)

    def on_exception(self, exception: BaseException) -> None:
        """Note that Lightning will report this error."""
        self._failed = True

    def teardown(self) -> None:
        """Wait for a sharded checkpoint that is being written, also after an error."""
        self._ended = True
        try:
            self.finish_write()
            if self.sharded_checkpoints and not self._failed:
                self.barrier()  # until rank 0 has renamed it
        except Exception as error:
            if not self._failed:
                raise
            log.error("%s", error)
        super().teardown()

    @property
    def writing(self) -> Path | None:
        """The sharded checkpoint that is being written, or None."""
        return None if self._write is None else self._write[0]

    def finish_write(self, *, wait: bool = True) -> None:
        """Give a sharded checkpoint its name, once all ranks have written; with `wait=False`, if they have by now.

        Raises:
            OSError: a rank could not write; earlier checkpoints are unchanged
        """
        if self._write is None or not (wait or self._write[1].done()):
            return
        (path, future), self._write = self._write, None
        try:
            future.result()
        except CheckpointException as error:
            cause = next(
                (cause for cause, _ in error.failures.values() if isinstance(cause, OSError)), None
            )
            code, why = (
                (errno.EIO, repr(error))
                if cause is None
                else (cause.errno or errno.EIO, cause.strerror)
            )
            raise OSError(
                code, f"could not write {path} ({why}); earlier checkpoints are unchanged"
            ) from error
        if self.is_global_zero:
            replace(partial_of(path), path)  # an old one is of an abandoned branch of this run
            sync(path.parent)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load weights and optimizer states of a checkpoint, a file or a folder, into the shards; return the rest."""
        assert self.model is not None
        for part in self.model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()  # a Tuner restores weights while some are gathered
        module: Any = self.lightning_module
        if is_sharded(checkpoint_path):
            return self._load_sharded(Path(checkpoint_path), module)
        checkpoint: dict[str, Any] = torch.load(
            checkpoint_path, map_location="cpu", mmap=True, weights_only=True
        )
        check_recorded(checkpoint, module)
        set_model_state_dict(self.model, checkpoint["state_dict"], options=_FULL)
        for optimizer, saved in zip(
            self.optimizers, checkpoint.get("optimizer_states", ()), strict=False
        ):
            self._set_state(optimizer, saved, self._named(optimizer, saved)["state"], _FULL)
        return checkpoint

    def _load_sharded(self, folder: Path, module: Any) -> dict[str, Any]:
        """Read the shards of this rank from the files of all ranks."""
        assert self.model is not None
        checkpoint = read_sharded(folder, tensors=False, checksums=False)
        check_recorded(checkpoint, module)
        model = get_model_state_dict(self.model, options=_SHARDED)
        optimizers: list[Any] = [
            get_optimizer_state_dict(self.model, each, options=_SHARDED)
            if saved["state"]
            else saved
            for each, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=False)
        ]
        load(flat_tensors(model, optimizers), checkpoint_id=folder)
        set_model_state_dict(self.model, model, options=_SHARDED)
        for optimizer, state, saved in zip(
            self.optimizers, optimizers, checkpoint["optimizer_states"], strict=False
        ):
            self._set_state(optimizer, saved, state["state"], _SHARDED)
        return checkpoint

    def _set_state(
        self,
        optimizer: Optimizer,
        saved: dict[str, Any],
        state: dict[str, Any],
        options: StateDictOptions,
    ) -> None:
        """Load the groups of a saved state dict, and `state`, by names."""
        assert self.model is not None
        if not state:  # torch would take a step to fill it
            optimizer.load_state_dict(saved)
            return
        named = {"state": state, "param_groups": self._named(optimizer, saved)["param_groups"]}
        set_optimizer_state_dict(self.model, optimizer, named, options=options)

    def _named(self, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state dict with parameter names instead of numbers."""
        module: Any = self.lightning_module
        names_by_id = {id(parameter): name for name, parameter in module.named_parameters()}
        names: dict[int, str] = {}
        for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            for parameter, number in zip(group["params"], saved_group["params"], strict=True):
                names[number] = names_by_id[id(parameter)]
        groups = []
        for group in saved["param_groups"]:
            groups.append(group | {"params": [names[number] for number in group["params"]]})
        states = {names[number]: state for number, state in saved["state"].items()}
        return {"state": states, "param_groups": groups}


def check_strategy(strategy: object) -> None:
    """Refuse Lightning's own sharding, under which each rank clips by the norm of its shard, with a ConfigError."""
    other = isinstance(strategy, FSDPStrategy | DeepSpeedStrategy | ModelParallelStrategy)
    wanted = "auto, ddp or lightning_sv.lit.fsdp.FullyShardedStrategy, which clip by the norm over all devices."
    expect(
        not other or isinstance(strategy, FullyShardedStrategy),
        "trainer.strategy",
        type(strategy).__name__,
        wanted,
    )
