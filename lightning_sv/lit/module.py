"""LightningModule: backbone, loss, optimizer and schedule."""

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, is_dataclass, replace
from inspect import currentframe, signature
from io import BytesIO
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Self

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import SumMetric

from lightning_sv.callbacks.progress import RunProgress
from lightning_sv.callbacks.run_state import data_of, total_steps
from lightning_sv.callbacks.training_monitor import is_monitored
from lightning_sv.errors import ConfigError, expect
from lightning_sv.lit.checkpoint.callback import restart_between_steps, restore_rng, rng_states
from lightning_sv.lit.checkpoint.compat import Start, check_function, check_settings, recorded_settings
from lightning_sv.lit.fsdp import check_strategy, shard
from lightning_sv.lit.nonfinite import NonFinite
from lightning_sv.nn import Backbone, BackboneConfig, MixtureOfExperts, Routing, document_ids, router_loss
from lightning_sv.nn.backbone import compile_backbone
from lightning_sv.optim import OptimConfig, ScheduleConfig, build_optimizer, clip_by_role
from lightning_sv.runs.checkpoint import CHECKPOINT_KEY, FORMAT, RNG_KEY
from lightning_sv.runs.provenance import Segments, commit
from lightning_sv.runs.sharded_checkpoint import is_sharded, read_sharded
from lightning_sv.scale import ScaleOptions
from lightning_sv.settings.model import PretrainConfig, preset

log = logging.getLogger(__name__)

#: names of the losses that a fit logs, for callbacks that monitor one
LOSSES = ("train/loss", "val/loss", "val/perplexity")
_FINDERS = (LearningRateFinder, BatchSizeFinder)


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
        settings: these arguments and derived values (number of parameters, groups, FLOPs)

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
        backbone, scale_options = _config(BackboneConfig, backbone), _config(ScaleOptions, scale_options)
        optim, schedule = _config(OptimConfig, optim), _config(ScheduleConfig, schedule)
        optim = replace(optim, lr=lr) if lr is not None and isinstance(optim, OptimConfig) else optim
        self.settings = PretrainConfig(
            backbone, scale, scale_options, optim, schedule, tokens_per_param, mask_documents, compile,
            activation_checkpointing, residual, nonfinite, seed, init_from,
        )  # fmt: skip
        self.save_hyperparameters(asdict(self.settings))
        self.nonfinite = NonFinite(skip=nonfinite == "skip")
        self.backbone: Backbone | None = None
        # Two sums in float64, because MeanMetric drops weights with nan_strategy="disable", which makes NaN visible.
        self.val_nats, self.val_tokens = (SumMetric(nan_strategy="disable").set_dtype(torch.float64) for _ in range(2))
        self.grad_norm: float | None = None  # of the last step
        #: before a step: whether a signal requested a stop; after it: whether any device received one
        self.stop_asked = False
        self.stop_agreed = False  # whether `NonFinite.check` has compared the devices in this step
        #: (blocks, experts) tokens of each expert on all devices since the last step
        self._loads: Tensor | None = None
        #: loss and tokens of each expert of the last micro-batch, until its backward pass
        self._last: tuple[Tensor, Tensor | None] | None = None
        self.segments = Segments()
        #: origin of the initial weights, see `checkpoint.compat.Start`; None if initialized
        self.origin: dict[str, Any] | None = None
        self._start: Start | None = None  # until the backbone exists
        self._loaded = False  # whether the weights are not those of an initialization
        self._rng: list[dict[str, Any]] | None = None  # random states of the checkpoint, until training starts

    @classmethod
    def from_preset(cls, name: str, **changes: Any) -> Self:
        """Create a module for a model in conf/model, e.g. 'tiny', 'mini' or 'llama-0.12b'.

        Args:
            name: name of the file in conf/model
            **changes: further arguments of the module or subclass; fields of the backbone are given as `d_model=64`

        Raises:
            ConfigError: an unknown preset or argument
        """
        own = changes.keys() & (signature(cls).parameters.keys() - signature(PretrainModule).parameters.keys())
        more = {key: changes.pop(key) for key in own}
        return cls(**preset(name, changes), **more)

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:  # type: ignore[override]
        """Load a module as Lightning does, also from the folder of a sharded checkpoint."""
        if isinstance(checkpoint_path, str | Path) and is_sharded(checkpoint_path):
            checkpoint, checkpoint_path = read_sharded(checkpoint_path, tensors=True, checksums=True), BytesIO()
            torch.save(checkpoint, checkpoint_path)
            checkpoint_path.seek(0)
        return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)

    def save_hyperparameters(
        self, *args: Any, ignore: Any = None, frame: FrameType | None = None, logger: bool = True
    ) -> None:
        """Save arguments as Lightning does, but configs as plain values, which loggers and weights_only=True need."""
        here = currentframe()
        frame = frame or (here and here.f_back)  # that of the caller, whose arguments are saved
        super().save_hyperparameters(*args, ignore=ignore, frame=frame, logger=logger)
        plain = asdict(self.settings)
        if configs := {key: plain[key] for key, value in self.hparams.items() if is_dataclass(value) and key in plain}:
            super().save_hyperparameters(configs, logger=logger)

    @property
    def lr(self) -> float:
        """Peak learning rate; settable, as Lightning's LearningRateFinder requires."""
        return self.settings.lr

    @lr.setter
    def lr(self, lr: float) -> None:
        self.settings = replace(self.settings, optim=replace(self.settings.optim, lr=lr))
        self.save_hyperparameters({"optim": asdict(self.settings.optim)})

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

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return logits (B, T, V) of token ids (B, T).

        Args:
            tokens: token ids
            documents: (B, T) document numbers, to restrict attention to the same document; None for full attention

        Raises:
            ConfigError: an export of a module without weights
        """
        if self.backbone is None:
            if torch.compiler.is_exporting():  # weights that a trace creates would not be parameters of the export
                raise ConfigError(f"{type(self).__name__} has no weights; expected a call of configure_model() first.")
            self.configure_model()
            # those of an earlier `module.to(...)`
            self.net.to(self.device, self.dtype)  # type: ignore[arg-type]
        return self.net(tokens, documents)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load weights, after building the backbone that they belong to."""
        self.configure_model()
        self._loaded = True
        return super().load_state_dict(*args, **kwargs)

    def start_from(self, start: Start) -> None:
        """Use the weights of `start`, from the same model, instead of an initialization."""
        self._start, self.origin, self._loaded = start, start.origin, True

    def setup(self, stage: str) -> None:
        """Refuse Lightning's finders after an earlier fit of the Trainer."""
        if stage == "fit" and self.trainer.global_step > 0:
            _refuse_finders(self.trainer)

    def configure_model(self) -> None:
        """Build and initialize the backbone, and shard it if the strategy does; called by Lightning."""
        settings, seed, is_new = self.settings, self.init_seed, self.backbone is None
        if self.backbone is None:
            # `shard` initializes a new sharded model one block at a time.
            meta = self.device_mesh is not None and self._start is None
            # Tensors of inference mode could not be trained later.
            with torch.inference_mode(False), torch.device("meta") if meta else nullcontext():
                self.backbone = Backbone(settings.backbone, settings.strategy, settings.scale_options, seed=seed)
            if self._start is not None:
                self._start.load(self.backbone)
                self._start = None
            self.backbone.activation_checkpointing = settings.activation_checkpointing
            self.backbone.narrow_residual = settings.residual == "narrow"
        if self.device_mesh is not None and not isinstance(self.backbone, FSDPModule):
            expect(settings.compile != "model", "compile", "model", "block or none for a sharded model.")
            strategy: Any = self.trainer.strategy
            check_strategy(strategy)
            seed = strategy.broadcast(seed)  # without a seed each rank has its own
            shard(self.backbone, strategy.mesh, strategy.root_device, seed=seed, keep_gathered=strategy.keep_gathered)
        if is_new:  # in place, so that the checkpoint's keys do not change
            compile_backbone(self.backbone, settings.compile)

    def loss(self, block: Tensor) -> tuple[Tensor, list[Routing]]:
        """Return the mean next-token loss in nats per token of a (B, T + 1) block, and the routings."""
        block = _token_block(block, self.settings.backbone.vocab_size)
        tokens, targets = block[:, :-1], block[:, 1:]
        documents = self._documents(tokens)
        return self.net(tokens, documents, targets=targets, with_routing=True)

    def _documents(self, tokens: Tensor) -> Tensor | None:
        """Return the documents of a `TokenDataModule`'s tokens if attention is restricted to them."""
        if not self.settings.mask_documents:
            return None
        data = None if self._trainer is None else data_of(self.trainer)
        wanted = "a TokenDataModule, which knows where documents end. Set mask_documents=False for other data."
        expect(data is not None, "mask_documents", True, wanted)
        assert data is not None
        return document_ids(tokens, data.manifest.eot)

    @property
    def _in_bar(self) -> bool:
        """Return True if Lightning's progress bar shows the losses, for which it waits for the device."""
        return self._trainer is None or not isinstance(self._trainer.progress_bar_callback, RunProgress)

    def training_step(self, block: Tensor, batch_idx: int) -> dict[str, Any]:
        """Return loss, next-token loss and routings of one micro-batch; log train/loss."""
        nats, routings = self.loss(block)
        if routings:
            totals = torch.stack([routing.load for routing in routings])  # (blocks, experts)
            if torch.distributed.is_initialized():
                torch.distributed.all_reduce(totals)  # the strategy's reduction would add a barrier
            routings = [routing._replace(total=total) for routing, total in zip(routings, totals, strict=True)]
        loss = nats + router_loss(routings, self.settings.backbone)
        self._last = loss.detach(), totals if routings else None
        # In manual optimization training_step may return nothing, so a TrainingMonitor has no loss to log.
        monitored = self._trainer is not None and self.automatic_optimization and is_monitored(self._trainer)
        to_loggers = False if monitored else None
        self.log("train/loss", nats.detach(), prog_bar=self._in_bar, logger=to_loggers, batch_size=len(block))
        return {"loss": loss, "nats": nats.detach(), "routings": [routing.detach() for routing in routings]}

    def on_before_backward(self, loss: Tensor) -> None:
        """Count the micro-batch towards the step; a callback that calls `training_step` is not counted."""
        if self._last is not None and self.automatic_optimization:  # the training_step of a subclass may not set it
            value, loads = self._last
            self._last = None
            self.nonfinite.losses.append(value)
            self._loads = loads if self._loads is None or loads is None else self._loads + loads

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Step, then update the experts' biases by the step's loads on all devices."""
        super().optimizer_step(*args, **kwargs)
        if self.nonfinite.losses:
            rank_zero_warn("configure_gradient_clipping does not call super(), so losses of NaN do not stop the run")
            self.nonfinite.losses.clear()
        loads, self._loads = self._loads, None
        if loads is not None and not self.nonfinite.skipped_now:
            mixtures = (m for m in self.net.modules() if isinstance(m, MixtureOfExperts))
            for mixture, load in zip(mixtures, loads, strict=True):
                mixture.move_bias(load)

    def on_validation_epoch_start(self) -> None:
        """Drop the sums of a validation that was interrupted."""
        with torch.inference_mode(False):  # otherwise a later fit could not add to the sums
            for total in (self.val_nats, self.val_tokens):
                total.set_dtype(torch.float64)  # precision bf16-true has converted it with the weights
                total.reset()

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, block: Tensor, batch_idx: int) -> None:
        """Accumulate the loss, weighted by tokens."""
        tokens = block[:, 1:].numel()
        self.val_nats.update(self.loss(block)[0].double() * tokens)
        self.val_tokens.update(torch.full((), tokens, device=block.device))  # without a copy from the host

    test_step = validation_step

    def predict_step(self, block: Tensor, batch_idx: int) -> Tensor:
        """Return the logits (B, T, V) of the next tokens of a (B, T + 1) block, on the CPU in float32."""
        tokens = _token_block(block, self.settings.backbone.vocab_size)[:, :-1]
        return self(tokens, self._documents(tokens)).float().cpu()

    def on_validation_epoch_end(self) -> None:
        """Log val/loss, nats per token, and val/perplexity; in a test, test/loss and test/perplexity."""
        split, step = ("test", "test_step") if self.trainer.testing else ("val", "validation_step")
        if is_overridden(step, self, PretrainModule) and not self.val_tokens.update_called:
            return  # the subclass logs its own losses
        loss = self.val_nats.compute() / self.val_tokens.compute()
        to_loggers = False if is_monitored(self.trainer) and self.trainer.state.fn == "fit" else None
        # Equal on all ranks, because the metrics sum over them; without sync_dist Lightning warns.
        self.log(f"{split}/loss", loss, logger=to_loggers, prog_bar=self._in_bar, sync_dist=True)
        self.log(f"{split}/perplexity", loss.exp(), logger=to_loggers, sync_dist=True)
        PretrainModule.on_validation_epoch_start(self)  # a subclass may replace it

    on_test_epoch_end = on_validation_epoch_end

    def configure_optimizers(self) -> Any:
        """Return the optimizer and its per-step schedule."""
        settings = self.settings
        optimizer = build_optimizer(settings.parameter_groups(self.net), settings.optim, settings.lr)
        trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        if left := [name for name, each in self.named_parameters() if each.requires_grad and each not in trained]:
            log.warning("%s is not trained, because the optimizer lacks it; override configure_optimizers", left[0])
        steps = total_steps(self.trainer)
        if steps is None:
            log.warning("the number of steps is not known: the learning rate stays at its peak; set max_steps")
            return optimizer
        self._steps = steps
        done = 0 if self.trainer.ckpt_path else self.trainer.global_step  # in earlier fits of this Trainer
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])  # LambdaLR needs it to continue
        self._built_lr = settings.lr
        scheduler = LambdaLR(optimizer, self._rate_factor, last_epoch=done - 1)
        self._peaks = scheduler.base_lrs
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _rate_factor(self, step: int) -> float:
        """Return the learning rate of a step over that of the optimizer's groups, which a finder may have replaced."""
        last = self._steps - 1
        return self.settings.schedule.factor(min(step, last), self._steps) * (self.lr / self._built_lr)

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip by the global norm, or per role in `optim.clip_by_role`; store the norm before that for logging."""
        by_value = gradient_clip_algorithm == "value"
        limit = (not by_value and gradient_clip_val) or float("inf")  # Lightning's 0 means no clipping
        norm = clip_by_role(self.parameters(), optimizer, limit, self.settings.optim.clip_by_role)
        precision = self.trainer.precision_plugin
        scaled = isinstance(precision, MixedPrecision) and precision.scaler is not None
        self.grad_norm = self.nonfinite.check(self, norm, scaled=scaled)
        if by_value:  # last, because it makes an infinite gradient finite
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def on_fit_start(self) -> None:
        """Check strategy and weights, clear the values that Lightning's finders logged, and give SWA the weights."""
        check_strategy(self.trainer.strategy)
        if not self.automatic_optimization and self.settings.backbone.router.balance == "bias":
            rank_zero_warn("router.balance is 'bias', but in manual optimization nothing calls the experts' move_bias")
        epoch = self.trainer.fit_loop.epoch_loop
        for logged in (epoch._results, epoch.val_loop._results):
            logged.clear()
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            copy: Any = getattr(callback, "_average_model", None)
            if isinstance(callback, StochasticWeightAveraging) and copy.backbone is None:
                callback.setup(self.trainer, self, "fit")  # its copy was made before the weights
        wanted = "None in your own Trainer. Load the weights with load_state_dict."
        loads = self._loaded or self.trainer.ckpt_path is not None  # FSDP2 restores it later
        expect(self.settings.init_from is None or loads, "init_from", self.settings.init_from, wanted)

    def on_train_start(self) -> None:
        """Restore the random states of the checkpoint, if there is one, and the accumulation of its epoch."""
        self._last = self._loads = None  # of a step that an earlier fit did not finish
        self.nonfinite.losses.clear()
        if self.trainer.global_step == 0:
            self.nonfinite.skipped = 0
        for scheduler in self._schedulers():  # Lightning calls it at the start of an epoch only
            scheduler.on_train_epoch_start(self.trainer, self)
        if getattr(self.trainer.precision_plugin, "scaler", None) is not None:
            for optimizer in self.trainer.optimizers:  # a fused one would unscale gradients after they are clipped
                optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        if self._rng is not None:
            restore_rng(self._rng, self.global_rank, self.device)
            self._rng = None
            self._schedule_rates()

    def _schedule_rates(self) -> None:
        """Set the rates of the next step by the schedule of this run, which may have a different length.

        A checkpoint's peaks are those from before a LearningRateFinder.
        """
        schedulers = [] if self.own_optimizer else [each.scheduler for each in self.trainer.lr_scheduler_configs]
        for scheduler in schedulers:
            if isinstance(scheduler, LambdaLR):  # StochasticWeightAveraging replaces it
                scheduler.base_lrs = self._peaks
                rates = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
                for group, (peak, factor) in zip(scheduler.optimizer.param_groups, rates, strict=True):
                    group["lr"] = peak * factor(scheduler.last_epoch)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the settings as plain values that load with weights_only=True."""
        trainer, data = self.trainer, data_of(self.trainer)
        progress = {
            "accumulate": trainer.accumulate_grad_batches,
            "skipped_steps": self.nonfinite.skipped,
            "legs": self.segments_so_far(),
            "commit": commit(),
            "corpus_hash": None if data is None else data.manifest.corpus_hash,
            "origin": self.origin,
            "built_by": self.built_by,
        }
        checkpoint[CHECKPOINT_KEY] = {"format": FORMAT} | recorded_settings(self.settings, data) | progress
        checkpoint[RNG_KEY] = rng_states(self.device)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check the settings, and continue after the saved step, also on a different number of devices."""
        self._loaded = True
        if self._trainer is None:  # load_from_checkpoint, whose arguments may replace the checkpoint's settings
            check_function(checkpoint, self.settings)
            return
        self.check_settings(checkpoint)
        if self.trainer.state.fn == "fit":
            if checkpoint["global_step"] > 0:  # that of a finder itself is of step 0
                _refuse_finders(self.trainer)
            saved = checkpoint[CHECKPOINT_KEY]
            self._rng = checkpoint[RNG_KEY]
            self.nonfinite.skipped = saved["skipped_steps"]
            self.origin = saved.get("origin")
            self.segments.restore(saved.get("legs"))
            now = saved["accumulate"] if self._schedulers() else self.trainer.accumulate_grad_batches
            restart_between_steps(checkpoint, saved["accumulate"], now)

    def _schedulers(self) -> list[GradientAccumulationScheduler]:
        callbacks: list[L.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        return [callback for callback in callbacks if isinstance(callback, GradientAccumulationScheduler)]

    def check_settings(self, checkpoint: dict[str, Any]) -> None:
        """Check that the settings match the checkpoint, see `checkpoint.compat.check_settings`."""
        training, data = self.trainer.state.fn == "fit", data_of(self.trainer)
        check_settings(
            checkpoint, self.settings, data, training=training, own_groups=self.has_own_groups, built_by=self.built_by
        )

    def segments_so_far(self) -> list[dict[str, Any]]:
        """Return the segments of the run, each with the settings that change its numbers."""
        trainer = self.trainer
        numerics = {"precision": str(trainer.precision), "device": trainer.strategy.root_device.type}
        data = data_of(trainer)
        if data is not None and self.settings.backbone.n_expert:  # their balance loss depends on the micro-batch
            numerics["micro_batch"] = str(data.share(trainer.world_size).micro_batch)
        return self.segments.at(trainer.global_step, trainer.max_steps, numerics)

    @property
    def built_by(self) -> str | None:
        """Name of a subclass that replaces `configure_model`, so that the settings may not describe the model."""
        return type(self).__name__ if is_overridden("configure_model", self, PretrainModule) else None

    @property
    def own_optimizer(self) -> str | None:
        """Name of a subclass that replaces `configure_optimizers`; else None."""
        return type(self).__name__ if is_overridden("configure_optimizers", self, PretrainModule) else None

    @property
    def has_own_groups(self) -> bool:
        """True if the optimizer's groups may differ from those of the settings, for instance by frozen weights."""
        trains = [[p.requires_grad for p in net.parameters()] for net in (self.backbone, self.settings.meta()) if net]
        return bool(self.own_optimizer or self.built_by) or trains[0] != trains[-1]


def _config(kind: Callable[..., Any], value: Any) -> Any:
    """Return a config from its fields: load_from_checkpoint passes a dictionary, with hparams_file omegaconf's."""
    if isinstance(value, Mapping) and not isinstance(value, dict):
        from omegaconf import OmegaConf  # imported here, because a module needs it for such a file only

        value = OmegaConf.to_container(value)
    return kind(**value) if isinstance(value, dict) else value


def _refuse_finders(trainer: L.Trainer) -> None:
    """Refuse a LearningRateFinder or BatchSizeFinder, which would take earlier steps for its own.

    Lightning's BatchSizeFinder makes no step at all if the fit has more steps than a trial, and a LearningRateFinder
    continues a finished schedule.

    Raises:
        ConfigError: the Trainer has one of them
    """
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    finder = next((each for each in callbacks if isinstance(each, _FINDERS)), None)
    if finder is None:
        return
    if finder._early_exit:  # added by a Tuner, which removes it only after a success
        trainer.callbacks = [each for each in callbacks if each is not finder]  # type: ignore[attr-defined]
    name, hint = type(finder).__name__, "Search before the first fit, with a new Trainer."
    raise ConfigError(f"a callback is {name}; expected none in a fit that continues from a later step than 0. {hint}")


def _token_block(block: Any, vocabulary: int) -> Tensor:
    """Return a user's batch of token ids as int64 or int32 (B, T + 1), after a check."""
    if not isinstance(block, Tensor):
        raise ConfigError(f"the batch is a {type(block).__name__}; expected a (B, T + 1) tensor of token ids.")
    is_integer = not (block.is_floating_point() or block.is_complex() or block.dtype == torch.bool)
    if not is_integer or block.ndim != 2 or block.shape[1] < 2:
        found = f"{block.dtype} {tuple(block.shape)}"
        raise ConfigError(f"the batch is {found}; expected integer token ids (B, T + 1), with T of at least 1.")
    if block.dtype not in (torch.int32, torch.int64):  # torch has few operations for other integers
        block = block.long()
    if block.device.type == "cpu" and not torch.compiler.is_compiling():  # elsewhere it would wait for the device
        low, high = (int(each) for each in block.aminmax())
        wanted = f"0 to {vocabulary - 1}. Masked targets, such as -100, are not supported."
        expect(low >= 0 and high < vocabulary, "the range of token ids", f"{low} to {high}", wanted)
    return block
