"""Strategy of fully sharded data parallelism (FSDP2), and its checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    Strategy,
)
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_sv.callbacks.run_state import callbacks_of, settings_of
from lightning_sv.errors import ConfigError
from lightning_sv.lit.checkpoint.atomic_io import AtomicCheckpointIO
from lightning_sv.lit.checkpoint.compat import check_recorded
from lightning_sv.lit.checkpoint.sharded_write import write_sharded
from lightning_sv.runs.sharded_checkpoint import (
    flat_tensors,
    is_sharded,
    number_parameters,
    read_sharded,
)

_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
_SHARDED = StateDictOptions(full_state_dict=False)
#: refused strategy of Lightning -> reason, as docs/own-trainer.md
_REFUSED: dict[type[Strategy], str] = {
    FSDPStrategy: "each device would clip by the gradient norm of its own shard",
    DeepSpeedStrategy: "its engine clips gradients itself, by its own configuration",
    ModelParallelStrategy: "its checkpoints number optimizer states differently from those of ddp",
}


class FullyShardedStrategy(ModelParallelStrategy):
    """Lightning's FSDP2 strategy over all devices of all nodes, for a `PretrainModule`.

    It reads the checkpoints of every other strategy, and writes them too, unless
    `save_distributed_checkpoint`. Lightning's own strategy numbers the optimizer's states in the
    order of the model, torch in the order of the parameter groups. Here it is torch's, so that a
    run moves between one device, DDP and FSDP2.

    Args:
        process_group_backend: backend of torch.distributed; null for the device's default
        save_distributed_checkpoint: if True, each rank writes its shard. A checkpoint is a folder
            (`lightning_sv.runs.sharded_checkpoint`), which resumes on every number of devices. To
            resume under a different strategy, your own Trainer needs the plugin
            `lit.checkpoint.atomic_io.AtomicCheckpointIO`
        timeout: longest time that a rank waits for the others; null for torch's default.
            Lightning's 30 minutes would cost many GPU-hours
    """

    def __init__(
        self,
        process_group_backend: str | None = None,
        *,
        save_distributed_checkpoint: bool = False,
        timeout: timedelta | None = timedelta(minutes=10),
    ):
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.sharded_checkpoints = save_distributed_checkpoint

    @property
    def _net(self) -> nn.Module:
        """The module that the Trainer trains; it exists from `setup` on."""
        assert self.model is not None
        return self.model

    def setup_environment(self) -> None:
        """Make the mesh of all devices; Lightning's "auto" is tensor parallelism inside a node."""
        module: Any = self.lightning_module
        self._check_module(module)
        for callback in callbacks_of(module.trainer, WeightAveraging):
            name = type(callback).__name__
            expected = "none that copies the model, because sharded weights cannot be copied"
            raise ConfigError(f"a callback is {name}; expected {expected}.")
        _use_no_grad(module.trainer)
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()
        self.mesh = self.device_mesh["data_parallel"]

    def _check_module(self, module: LightningModule) -> None:
        """Refuse a module without the backbone and the settings that later methods read."""
        if settings_of(module) is None:
            found = f"{type(self).__name__} and the module a {type(module).__name__}"
            hint = "Use Lightning's ModelParallelStrategy for a module of your own."
            raise ConfigError(f"trainer.strategy is {found}; expected a PretrainModule. {hint}")

    def setup(self, trainer: Trainer) -> None:
        """Refuse to fit a model that is not sharded: each device would train its own weights."""
        self._reshard()
        if trainer.state.fn == TrainerFn.FITTING:
            self._check_sharded()
        super().setup(trainer)

    def _reshard(self) -> None:
        """Shard the embedding and the head again, which a validation leaves gathered."""
        for part in self._net.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def _check_sharded(self) -> None:
        for name, parameter in self._net.named_parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                found = f"{type(self).__name__}, and the weight {name} is not sharded"
                expected = "weights that configure_model shards, as that of PretrainModule does"
                raise ConfigError(f"trainer.strategy is {found}; expected {expected}. Use ddp.")

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keep complete gradients on every device in all micro-batches of a step but the last.

        Lightning's own method supports DDP only. Reducing in each micro-batch multiplies the
        traffic of a step by their number; complete gradients cost 4 bytes per parameter, which
        `plan` counts.
        """
        module: Any = self.lightning_module
        backbone = module.net
        backbone.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            backbone.set_requires_gradient_sync(True)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state that a checkpoint has: a collective.

        A file has the complete state, gathered on rank 0, with torch's own numbers for parameters;
        the other ranks return {}. A sharded checkpoint has the shards of this rank under the names
        of parameters.
        """
        optimizer = getattr(optimizer, "_optimizer", optimizer)  # Lightning wraps it
        if self.sharded_checkpoints:
            return self._state_by_name(optimizer, _SHARDED)
        gathered = self._state_by_name(optimizer, _FULL)
        return number_parameters(gathered) if gathered else {}

    def _state_by_name(self, optimizer: Optimizer, options: StateDictOptions) -> dict[str, Any]:
        """Return a state dict with parameter names; empty if it is gathered on a different rank.

        Before the first step, torch fills the state by a step without gradients, which would count
        as a step of the run. So that state is removed again.
        """
        has_stepped = bool(optimizer.state)
        named: dict[str, Any] = get_optimizer_state_dict(self._net, optimizer, options=options)
        if not named.get("param_groups"):
            named = {}
        if has_stepped:
            return named
        optimizer.state.clear()
        return named | {"state": {}} if named else {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint file, or a folder with `write_sharded`."""
        if self.sharded_checkpoints:
            path = Path(self.broadcast(str(filepath)))
            write_sharded(self, checkpoint, path)
            return
        if self._checkpoint_io is None:  # the Trainer has no plugin for it
            self.checkpoint_io = AtomicCheckpointIO()
        if isinstance(self.checkpoint_io, AtomicCheckpointIO):
            # replaces a sharded checkpoint there, which ModelParallelStrategy would remove first
            Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)
        else:
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the weights and optimizer states of a file or folder; return the checkpoint."""
        path = Path(checkpoint_path)
        return self._load_folder(path) if is_sharded(path) else self._load_file(path)

    def _load_file(self, path: Path) -> dict[str, Any]:
        """Take the shards of this rank from the complete tensors of a file."""
        checkpoint: dict[str, Any] = torch.load(
            path, map_location="cpu", mmap=True, weights_only=True
        )
        check_recorded(checkpoint, self.lightning_module)
        set_model_state_dict(self._net, checkpoint["state_dict"], options=_FULL)
        saved_states = checkpoint.get("optimizer_states", ())  # none without a fit
        for optimizer, saved in zip(self.optimizers, saved_states, strict=False):
            named = self._with_names(optimizer, saved)
            self._load_optimizer(optimizer, saved, named["state"], _FULL)
        return checkpoint

    def _load_folder(self, folder: Path) -> dict[str, Any]:
        """Read the shards of this rank from the files of all ranks.

        `load` fills tensors in place, so the state dicts of this rank are made first.
        """
        checkpoint = read_sharded(folder, tensors=False, checksums=False)
        check_recorded(checkpoint, self.lightning_module)
        model = get_model_state_dict(self._net, options=_SHARDED)
        pairs = list(zip(self.optimizers, checkpoint.get("optimizer_states", ()), strict=False))
        shards = [self._shards_to_fill(optimizer, saved) for optimizer, saved in pairs]

        load(flat_tensors(model, shards), checkpoint_id=folder)

        set_model_state_dict(self._net, model, options=_SHARDED)
        for (optimizer, saved), filled in zip(pairs, shards, strict=True):
            self._load_optimizer(optimizer, saved, filled["state"], _SHARDED)
        return checkpoint

    def _shards_to_fill(self, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's state dict with tensors of any content; none before the first step."""
        if not saved["state"]:
            return saved
        shards: dict[str, Any] = get_optimizer_state_dict(self._net, optimizer, options=_SHARDED)
        return shards

    def _load_optimizer(
        self,
        optimizer: Optimizer,
        saved: dict[str, Any],
        states: dict[str, Any],
        options: StateDictOptions,
    ) -> None:
        """Load the groups of a saved state dict, and the states of parameters by name."""
        if not states:  # before the first step: torch would take a step to fill it
            optimizer.load_state_dict(saved)
            return
        groups = self._with_names(optimizer, saved)["param_groups"]
        named = {"state": states, "param_groups": groups}
        set_optimizer_state_dict(self._net, optimizer, named, options=options)

    def _with_names(self, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """Return a saved state dict with parameter names instead of torch's numbers.

        The n-th parameter of a saved group is the n-th one of the optimizer's group.
        """
        module: Any = self.lightning_module
        name_of = {parameter: name for name, parameter in module.named_parameters()}
        names: dict[int, str] = {}
        groups = []
        for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            group_names = [name_of[parameter] for parameter in group["params"]]
            names |= zip(saved_group["params"], group_names, strict=True)
            groups.append(saved_group | {"params": group_names})
        states = {names[number]: state for number, state in saved["state"].items()}
        return {"state": states, "param_groups": groups}


def _use_no_grad(trainer: Trainer) -> None:
    """Validate, test and predict under `no_grad`, as a fit validates.

    Weights that are gathered in inference mode are inference tensors, into which FSDP2 cannot
    gather again outside of it, as in a fit after a validation.
    """
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False


def check_strategy(strategy: object) -> None:
    """Refuse Lightning's own sharding.

    Raises:
        ConfigError: such a strategy
    """
    if isinstance(strategy, FullyShardedStrategy):
        return
    for kind, reason in _REFUSED.items():
        if isinstance(strategy, kind):
            expected = "auto, ddp or lightning_sv.lit.fsdp.FullyShardedStrategy"
            found = f"trainer.strategy is {type(strategy).__name__}"
            raise ConfigError(f"{found}; expected {expected}, because {reason}.")
