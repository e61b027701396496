"""LightningModule with a backbone that is built when the Trainer's strategy is known."""

import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from inspect import Parameter, signature
from pickle import UnpicklingError
from typing import Any, Self

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lightning_sv.errors import ConfigError, expect_known
from lightning_sv.lit.checkpoint.compat import check_recorded, record_settings
from lightning_sv.lit.fsdp import check_strategy
from lightning_sv.lit.init_from import Start
from lightning_sv.lit.shard import shard
from lightning_sv.nn import Backbone
from lightning_sv.nn.backbone import compile_backbone
from lightning_sv.runs.sharded_checkpoint import as_file
from lightning_sv.settings.model import PretrainConfig


class BackboneModule(L.LightningModule):
    """Build the backbone of some settings in `configure_model`: initialized, given, or sharded.

    Checkpoints contain the settings, and are checked against them.

    Args:
        settings: settings of the model

    Attributes:
        settings: settings of the model
        backbone: the backbone; None before `configure_model`
        origin: origin of weights that were not initialized, see `Start`
        has_loaded_weights: whether weights were loaded
    """

    def __init__(self, settings: PretrainConfig):
        super().__init__()
        self.settings = settings
        self.backbone: Backbone | None = None
        self.origin: dict[str, Any] | None = None
        self.has_loaded_weights = False
        self._start: Start | None = None  # until the backbone exists

    @property
    def net(self) -> Backbone:
        """The backbone, which exists from `configure_model` on."""
        if self.backbone is None:
            name = type(self).__name__
            raise ConfigError(f"{name} has no weights; expected a call of configure_model() first.")
        return self.backbone

    @property
    def init_seed(self) -> int:
        """The seed of the initialization."""
        return torch.initial_seed() if self.settings.seed is None else self.settings.seed

    def start_from(self, start: Start) -> None:
        """Use the weights of `start`, from the same model, instead of an initialization."""
        self._start = start
        self.has_loaded_weights = True
        self.origin = start.origin

    def configure_model(self) -> None:
        """Build the backbone once, and shard it if the strategy does; called by Lightning."""
        is_new = self.backbone is None
        is_sharded = self.device_mesh is not None
        if is_new:
            initializes_shards = is_sharded and self._start is None
            self.backbone = self._build(without_weights=initializes_shards)
        if is_sharded and not isinstance(self.net, FSDPModule):
            self._shard(self.net)
        if is_new:
            # In place, so that the keys of checkpoints stay.
            compile_backbone(self.net, self.settings.compile)

    def _build(self, *, without_weights: bool) -> Backbone:
        """Return a new backbone; one without weights is initialized block by block when sharded."""
        settings = self.settings
        device = torch.device("meta") if without_weights else nullcontext()
        # The plan of the settings has warned of a strategy with words that have no effect.
        not_again = warnings.catch_warnings(action="ignore", category=UserWarning)
        # Inference tensors could not be trained later.
        with torch.inference_mode(False), device, not_again:
            backbone = Backbone(
                settings.backbone, settings.strategy, settings.scale_options, seed=self.init_seed
            )
        if self._start is not None:
            backbone.load_state_dict(self._start.weights)
            self._start = None
        backbone.activation_checkpointing = settings.activation_checkpointing
        backbone.narrow_residual = settings.residual == "narrow"
        backbone.set_attention_backend(settings.attention_backend)
        return backbone

    def _shard(self, backbone: Backbone) -> None:
        """Shard the backbone over the devices of the Trainer's strategy."""
        if self.settings.compile == "model":
            raise ConfigError("compile is model; expected block or none for a sharded model.")
        strategy: Any = self.trainer.strategy
        check_strategy(strategy)
        seed = strategy.broadcast(self.init_seed)  # without a seed each rank has its own
        shard(backbone, strategy.mesh, strategy.root_device, seed=seed)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load weights, after building the backbone that they belong to."""
        self.configure_model()
        self.has_loaded_weights = True
        return super().load_state_dict(*args, **kwargs)

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:  # type: ignore[override]
        """Load a module as Lightning does, also from the folder of a sharded checkpoint.

        Raises:
            ConfigError: the file is not a checkpoint of Lightning, or lacks an entry; or the module
                has no argument of a given name
        """
        _check_arguments(cls, kwargs)
        try:
            return super().load_from_checkpoint(as_file(checkpoint_path), *args, **kwargs)
        except (KeyError, EOFError, UnpicklingError) as error:
            reason = f"cannot be loaded ({error!r:.200})"
            expected = "a checkpoint that a Trainer has saved"
            raise ConfigError(f"{checkpoint_path} {reason}; expected {expected}.") from error

    # `ExactResume` stores and restores the rest of a checkpoint.

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the settings as plain values that load with weights_only=True."""
        record_settings(checkpoint, self)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that the settings are those of the checkpoint."""
        check_recorded(checkpoint, self)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return logits (B, T, V) of token ids (B, T).

        Args:
            tokens: token ids
            documents: (B, T) document numbers, to restrict attention to the same document; None for
                full attention

        Raises:
            ConfigError: an export of a module without weights
        """
        # Weights that a trace creates would not be parameters of the export.
        if self.backbone is None and not torch.compiler.is_exporting():
            self.configure_model()
            self.net.to(self.device, self.dtype)  # type: ignore[arg-type]  # of an earlier module.to
        return self.net(tokens, documents)

    @property
    def built_by(self) -> str | None:
        """Name of a subclass with its own `configure_model`; else None."""
        is_own = is_overridden("configure_model", self, BackboneModule)
        return type(self).__name__ if is_own else None


def _check_arguments(module_class: type[L.LightningModule], names: Iterable[str]) -> None:
    """Refuse unknown arguments of `load_from_checkpoint`, which Lightning would leave out."""
    own = signature(module_class).parameters
    takes_any = any(each.kind is Parameter.VAR_KEYWORD for each in own.values())
    if takes_any:
        return
    known = own | signature(L.LightningModule.load_from_checkpoint).parameters
    for name in names:
        expect_known("argument", name, known)
