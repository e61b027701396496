"""LightningModule: backbone, loss, optimizer and schedule."""

import logging
from dataclasses import asdict, replace
from inspect import signature
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, Self

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from lightning_sv.callbacks.progress import RunProgress
from lightning_sv.callbacks.run_state import total_steps
from lightning_sv.callbacks.training_monitor import is_monitored
from lightning_sv.errors import ConfigError
from lightning_sv.lit.batch import check_block, documents_of
from lightning_sv.lit.build import (
    build_backbone,
    config_from,
    learning_rate_schedule,
    shard_backbone,
    warn_untrained,
)
from lightning_sv.lit.checkpoint.compat import check_recorded, record_settings
from lightning_sv.lit.guards.exact_resume import ExactResume
from lightning_sv.lit.guards.expert_bias import ExpertBias
from lightning_sv.lit.guards.finite import FiniteGuard
from lightning_sv.lit.init_from import Start
from lightning_sv.lit.supported import check_initial_weights, check_supported
from lightning_sv.nn import Backbone, BackboneConfig, Routing, router_loss
from lightning_sv.nn.backbone import compile_backbone
from lightning_sv.optim import OptimConfig, ScheduleConfig, build_optimizer, clip_by_role
from lightning_sv.runs.sharded_checkpoint import is_sharded, read_sharded
from lightning_sv.scale import ScaleOptions
from lightning_sv.settings.model import PretrainConfig, preset

log = logging.getLogger(__name__)

#: names of the losses that a fit logs, for callbacks that monitor one
LOSSES = ("train/loss", "val/loss", "val/perplexity")


class PretrainModule(L.LightningModule):
    """Pre-train a Llama, LlamaMoE or Gemma backbone with a scale-vector strategy, for any Trainer.

    A batch is a (B, T + 1) tensor of token ids. Logs train/loss, val/loss, test/loss in nats per token, and
    val/perplexity, test/perplexity. Hyper-parameters are saved as plain values, so `load_from_checkpoint(path)`
    rebuilds the module.

    Args:
        backbone: sizes of the model
        scale: strategy: words joined by '+', one per axis (shared hg / nop bp ap dp dnp /
            direct, offset, or, er / wd iwd owd nowd), or a preset (llama, unified, unified-head-dp)
        scale_options: further options of the strategy
        optim: optimizer settings
        schedule: learning-rate schedule over the Trainer's steps; constant if only max_time ends the run
        tokens_per_param: training budget of the command line, in tokens per activated parameter; 100 in the paper
        mask_documents: restrict attention to a document of a packed sequence, with a `TokenDataModule` (not stated in
            the paper)
        compile: torch.compile mode: 'none', 'model' (the backbone as one graph) or 'block' (each block and the head)
        activation_checkpointing: save only the blocks' inputs for backward, and recompute the blocks there
        residual: dtype of the residual stream under bf16-mixed: 'wide' for float32; 'narrow' for bf16, with less memory
            and different rounding
        nonfinite: reaction to a loss or gradient that is not finite: 'stop' before the step, or 'skip' the step
        seed: seed of the initialization; None for that of seed_everything
        init_from: checkpoint, run directory or transformers folder (Llama, Mistral, Qwen 3, Gemma 3) with the initial
            weights, read by the command line; optimizer, steps and tokens start from zero
        lr: peak learning rate, overriding optim.lr

    Attributes:
        settings: these arguments; `settings.plan` has the number of parameters, groups, FLOPs and the learning rate

    Raises:
        ConfigError: a strategy, option or optimizer that does not fit the model, or no known learning rate
    """

    # torch.compile(module) with torch 2.12 and 2.13 cannot trace it (Lightning's issue 21836).
    log = torch.compiler.disable(L.LightningModule.log)

    def __init__(  # noqa: PLR0913
        self,
        backbone: BackboneConfig,
        scale: str = "llama",
        scale_options: ScaleOptions = ScaleOptions(),  # noqa: B008 (frozen)
        optim: OptimConfig = OptimConfig(),  # noqa: B008
        schedule: ScheduleConfig = ScheduleConfig(),  # noqa: B008
        tokens_per_param: float = 100.0,
        mask_documents: bool = False,
        compile: Literal["none", "model", "block"] = "none",
        activation_checkpointing: bool = False,
        residual: Literal["wide", "narrow"] = "wide",
        nonfinite: Literal["stop", "skip"] = "stop",
        seed: int | None = None,
        init_from: str | None = None,
        lr: float | None = None,
    ):
        super().__init__()
        optim = config_from(OptimConfig, optim)
        if lr is not None and isinstance(optim, OptimConfig):
            optim = replace(optim, lr=lr)
        self.settings = PretrainConfig(
            config_from(BackboneConfig, backbone), scale, config_from(ScaleOptions, scale_options), optim,
            config_from(ScheduleConfig, schedule), tokens_per_param, mask_documents, compile,
            activation_checkpointing, residual, nonfinite, seed, init_from,
        )  # fmt: skip
        self.save_hyperparameters(asdict(self.settings))
        _ = self.settings.plan  # refuses settings that do not fit each other

        self.backbone: Backbone | None = None
        self.expert_loads: Tensor | None = None
        self._start: Start | None = None  # until the backbone exists
        self.origin: dict[str, Any] | None = None
        self.has_loaded_weights = False
        self._loss_sums: Tensor | None = None  # nats and tokens of a validation

        self.nonfinite = FiniteGuard(skip=nonfinite == "skip")
        self.expert_bias = ExpertBias()
        self.exact_resume = ExactResume()

    @classmethod
    def from_preset(cls, name: str, **changes: Any) -> Self:
        """Create a module for a model in conf/model, e.g. 'tiny', 'mini' or 'llama-0.12b'.

        Args:
            name: name of the file in conf/model
            **changes: further arguments of the module or subclass; fields of the backbone are given as `d_model=64`

        Raises:
            ConfigError: an unknown preset or argument
        """
        own_names = signature(cls).parameters.keys() - signature(PretrainModule).parameters.keys()
        own = {key: changes.pop(key) for key in own_names & changes.keys()}
        return cls(**preset(name, changes), **own)

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:  # type: ignore[override]
        """Load a module as Lightning does, also from the folder of a sharded checkpoint."""
        source = checkpoint_path
        if isinstance(source, str | Path) and is_sharded(source):
            checkpoint = read_sharded(source, tensors=True, checksums=True)
            source = BytesIO()
            torch.save(checkpoint, source)
            source.seek(0)
        return super().load_from_checkpoint(source, *args, **kwargs)

    def configure_callbacks(self) -> list[L.Callback]:
        """Bring the callbacks that guard a run to every Trainer; a subclass adds its own to them."""
        if self.trainer.state.fn == "fit":
            check_supported(self)  # here, because Lightning calls no other hook before those of other callbacks
        return [self.nonfinite, self.expert_bias, self.exact_resume]

    def on_fit_start(self) -> None:
        """Check the initial weights, which exist by now."""
        check_initial_weights(self)

    # The model

    @property
    def lr(self) -> float:
        """Peak learning rate."""
        return self.settings.plan.lr

    @property
    def grad_norm(self) -> float | None:
        """Global norm of the gradient of the last step before clipping."""
        return self.nonfinite.norm

    @property
    def init_seed(self) -> int:
        """The seed of the initialization."""
        return torch.initial_seed() if self.settings.seed is None else self.settings.seed

    @property
    def net(self) -> Backbone:
        """The backbone, which exists from `configure_model` on."""
        if self.backbone is None:
            raise ConfigError(f"{type(self).__name__} has no weights; expected a call of configure_model() first.")
        return self.backbone

    def start_from(self, start: Start) -> None:
        """Use the weights of `start`, from the same model, instead of an initialization."""
        self._start = start
        self.has_loaded_weights = True
        self.origin = start.origin

    def configure_model(self) -> None:
        """Build and initialize the backbone, and shard it if the strategy does; called by Lightning."""
        settings = self.settings
        seed = self.init_seed
        is_sharded_later = self.device_mesh is not None
        is_new = self.backbone is None
        if self.backbone is None:
            # Sharding initializes a new model one block at a time.
            on_meta = is_sharded_later and self._start is None
            self.backbone = build_backbone(settings, seed, self._start, on_meta=on_meta)
            self._start = None
        if is_sharded_later and not isinstance(self.backbone, FSDPModule):
            shard_backbone(self.backbone, self.trainer, seed, settings.compile)
        if is_new:
            compile_backbone(self.backbone, settings.compile)  # in place: the checkpoint's keys stay

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load weights, after building the backbone that they belong to."""
        self.configure_model()
        self.has_loaded_weights = True
        return super().load_state_dict(*args, **kwargs)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return logits (B, T, V) of token ids (B, T).

        Args:
            tokens: token ids
            documents: (B, T) document numbers, to restrict attention to the same document; None for full attention

        Raises:
            ConfigError: an export of a module without weights
        """
        # Weights that a trace creates would not be parameters of the export.
        if self.backbone is None and not torch.compiler.is_exporting():
            self.configure_model()
            self.net.to(self.device, self.dtype)  # type: ignore[arg-type]  # of an earlier `module.to(...)`
        return self.net(tokens, documents)

    # Losses

    def loss(self, block: Tensor) -> tuple[Tensor, list[Routing]]:
        """Return the mean next-token loss in nats per token of a (B, T + 1) block, and the routings."""
        block = check_block(block, self.settings.backbone.vocab_size)
        tokens, targets = block[:, :-1], block[:, 1:]
        return self.net(tokens, self._documents(tokens), targets=targets, with_routing=True)

    def _documents(self, tokens: Tensor) -> Tensor | None:
        return documents_of(tokens, self._trainer) if self.settings.mask_documents else None

    def training_step(self, block: Tensor, batch_idx: int) -> dict[str, Any]:
        """Return loss, next-token loss and routings of one micro-batch; log train/loss.

        Set `expert_loads` to the tokens of each expert on all devices, (blocks, experts); None for a dense model.
        """
        nats, routings = self.loss(block)
        self.expert_loads = None
        if routings:
            self.expert_loads = torch.stack([routing.load for routing in routings])
            if torch.distributed.is_initialized():
                torch.distributed.all_reduce(self.expert_loads)  # the strategy's reduction would add a barrier
            pairs = zip(routings, self.expert_loads, strict=True)
            routings = [routing._replace(total=total) for routing, total in pairs]
        loss = nats + router_loss(routings, self.settings.backbone)

        # In manual optimization training_step may return nothing, so a TrainingMonitor has no loss to log.
        to_loggers = self._to_loggers if self.automatic_optimization else None
        self.log("train/loss", nats.detach(), prog_bar=self._in_bar, logger=to_loggers, batch_size=len(block))
        return {"loss": loss, "nats": nats.detach(), "routings": [routing.detach() for routing in routings]}

    def validation_step(self, block: Tensor, batch_idx: int) -> None:
        """Accumulate the loss, weighted by tokens, in float64."""
        nats, _ = self.loss(block)
        tokens = torch.full_like(nats, block[:, 1:].numel(), dtype=torch.float64)  # without a copy from the host
        sums = torch.stack((nats.double() * tokens, tokens))
        self._loss_sums = sums if self._loss_sums is None else self._loss_sums + sums

    test_step = validation_step

    def predict_step(self, block: Tensor, batch_idx: int) -> Tensor:
        """Return the logits (B, T, V) of the next tokens of a (B, T + 1) block, on the CPU in float32."""
        tokens = check_block(block, self.settings.backbone.vocab_size)[:, :-1]
        return self(tokens, self._documents(tokens)).float().cpu()

    def on_validation_epoch_start(self) -> None:
        """Drop the sums of a validation that was interrupted."""
        self._loss_sums = None

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self) -> None:
        """Log val/loss, nats per token, and val/perplexity; in a test, test/loss and test/perplexity."""
        sums, self._loss_sums = self._loss_sums, None
        if sums is None:
            return  # the subclass logs its own losses
        nats, tokens = self.trainer.strategy.reduce(sums, reduce_op="sum")  # type: ignore[arg-type, misc]
        loss = nats / tokens
        split = "test" if self.trainer.testing else "val"
        # Equal on all ranks; without sync_dist Lightning warns.
        self.log(f"{split}/loss", loss, prog_bar=self._in_bar, logger=self._to_loggers, sync_dist=True)
        self.log(f"{split}/perplexity", loss.exp(), logger=self._to_loggers, sync_dist=True)

    on_test_epoch_end = on_validation_epoch_end

    @property
    def _in_bar(self) -> bool:
        """Return True if Lightning's progress bar shows the losses, for which it waits for the device."""
        return self._trainer is None or not isinstance(self._trainer.progress_bar_callback, RunProgress)

    @property
    def _to_loggers(self) -> bool | None:
        """Return False in a fit with a `TrainingMonitor`: it alone logs the losses, as means over all devices."""
        if self._trainer is None or self._trainer.state.fn != "fit":
            return None
        return False if is_monitored(self._trainer) else None

    # Optimization

    def configure_optimizers(self) -> Any:
        """Return the optimizer and its per-step schedule."""
        settings = self.settings
        optimizer = build_optimizer(settings.plan.parameter_groups(self.net), settings.optim, settings.plan.lr)
        warn_untrained(self, optimizer)

        steps = total_steps(self.trainer)
        if steps is None:
            log.warning("the number of steps is not known: the learning rate stays at its peak; set max_steps")
            return optimizer
        done = 0 if self.trainer.ckpt_path else self.trainer.global_step  # in earlier fits of this Trainer
        scheduler = learning_rate_schedule(optimizer, settings.schedule, steps, done)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip by the norm of all gradients, or per role in `optim.clip_by_role`."""
        if gradient_clip_algorithm == "value":
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        limit = gradient_clip_val or float("inf")  # Lightning's 0 means no clipping
        limits = self.settings.optim.clip_by_role
        norm = self.nonfinite.gradient_norm
        if limits or norm is None:  # a subclass may have left out the guards
            clip_by_role(self.parameters(), optimizer, limit, limits)
        elif gradient_clip_val:
            clip_grads_with_norm_(self.parameters(), limit, norm, foreach=True)

    # Checkpoints; `ExactResume` stores and restores the rest

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the settings as plain values that load with weights_only=True."""
        record_settings(checkpoint, self)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that the settings are those of the checkpoint."""
        check_recorded(checkpoint, self)

    @property
    def built_by(self) -> str | None:
        """Name of a subclass that replaces `configure_model`, so that the settings may not describe the model."""
        return type(self).__name__ if is_overridden("configure_model", self, PretrainModule) else None

    @property
    def own_optimizer(self) -> str | None:
        """Name of a subclass that replaces `configure_optimizers`; else None."""
        return type(self).__name__ if is_overridden("configure_optimizers", self, PretrainModule) else None
