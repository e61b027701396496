"""The LightningModule: a backbone, its loss, its optimizer and schedule."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import SumMetric

from lightning_sv.callbacks import TrainedModule
from lightning_sv.lit.checkpoint.rng import restore_rng, rng_states
from lightning_sv.lit.checkpoint.settings import check_settings, settings_of
from lightning_sv.lit.checkpoint.start import Start, check_origin
from lightning_sv.lit.checkpoint.write import restart_between_steps
from lightning_sv.lit.nonfinite import NonFinite
from lightning_sv.lit.shard import shard
from lightning_sv.nn import Backbone, MixtureOfExperts, Routing, router_loss
from lightning_sv.nn.compiling import compile_backbone
from lightning_sv.nn.kernels.use import use_kernels
from lightning_sv.optim import build_optimizer, gathered
from lightning_sv.runs.checkpoint import CHECKPOINT_KEY, FORMAT, RNG_KEY
from lightning_sv.runs.provenance import Legs, commit


class PretrainModule(TrainedModule):
    """Pre-trains a backbone with a scale-vector strategy; its arguments are those of `Pretraining`."""

    nonfinite: NonFinite

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.nonfinite = NonFinite(skip=self.when_nonfinite == "skip")
        self.backbone = None
        #: folder of a transformers model whose weights a new run begins with
        self.from_hf: str | None = None
        # Two sums, in float64: MeanMetric ignores its weights where a NaN must show (nan_strategy="disable").
        self.val_nats, self.val_tokens = (SumMetric(nan_strategy="disable").set_dtype(torch.float64) for _ in range(2))
        self.grad_norm = float("nan")
        #: set before a step where a signal asks the run to stop; after it, whether any device was asked
        self.stop_asked = False
        #: (blocks, experts) tokens of each expert, on all devices, in the micro-batches since the last step
        self._loads: Tensor | None = None
        #: the starts that led here
        self.legs = Legs()
        #: of the weights that the run started from, see `checkpoint.start.Start`; None for a run of its own
        self.origin: dict[str, Any] | None = None
        self._start: Start | None = None  # until the backbone exists
        self._rng: list[dict[str, Any]] | None = None  # of the checkpoint, until training starts
        self.step_lr = self.lr  # of the last step: the scheduler has moved on when callbacks see the optimizer

    def start_from(self, start: Start) -> None:
        """Start from these weights, of the same model, instead of an initialization."""
        self._start, self.origin = start, start.origin

    def configure_model(self) -> None:
        """Build and initialize the backbone, then shard it where the strategy does; Lightning calls this."""
        if self.backbone is not None:
            return
        seed = torch.initial_seed() if self.seed is None else self.seed
        # Whole on every rank, then cut: a matrix is the same on any number of devices.
        self.backbone = Backbone(self.config, self.strategy, self.scale_options, seed=seed)
        if self.from_hf is not None:
            from lightning_sv.interop.hf.read import load_hugging_face

            load_hugging_face(self.backbone, self.from_hf)
        if self._start is not None:
            self.backbone.load_state_dict(self._start.weights)
            self._start = None
        self.backbone.activation_checkpointing = self.activation_checkpointing
        self.backbone.narrow_residual = self.residual == "narrow"
        use_kernels(self.backbone, self.kernels)
        if self.device_mesh is not None:
            assert self.compile_how != "model"  # the command line refuses it
            strategy: Any = self.trainer.strategy
            self.backbone.to(strategy.root_device)
            shard(self.backbone, self.device_mesh["data_parallel"], keep_gathered=strategy.keep_gathered)
        # In place: the checkpoint's keys stay clean.
        compile_backbone(self.backbone, self.compile_how)

    def loss(self, block: Tensor) -> tuple[Tensor, list[Routing]]:
        """Mean next-token loss in nats per token of a (B, T + 1) block of token ids, and the routings."""
        datamodule: Any = self.trainer.datamodule if self.mask_documents else None  # type: ignore[attr-defined]
        return self.nats(self.net, block, datamodule and datamodule.eot)

    def training_step(self, block: Tensor, batch_idx: int) -> dict[str, Any]:
        """Return the loss of one micro-batch, its part in nats per token, and the routings."""
        nats, routings = self.loss(block)
        if routings:
            totals = torch.stack([routing.load for routing in routings])  # (blocks, experts)
            if self.trainer.world_size > 1:
                torch.distributed.all_reduce(totals)  # the strategy's own would hold the host at a barrier
            routings = [routing._replace(total=total) for routing, total in zip(routings, totals, strict=True)]
            self._loads = totals if self._loads is None else self._loads + totals
        loss = nats + router_loss(routings, self.config)
        self.nonfinite.see(loss.detach())
        return {"loss": loss, "nats": nats.detach(), "routings": [routing.detach() for routing in routings]}

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        """Stop at the last step: only so does Lightning validate there too."""
        if self.trainer.global_step >= self.trainer.max_steps:
            self.trainer.should_stop = True

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Step, then move the experts' biases by the loads of the step's micro-batches on all devices."""
        super().optimizer_step(*args, **kwargs)
        loads, self._loads = self._loads, None
        if loads is not None and not self.nonfinite.skipped_now:
            mixtures = (m for m in self.net.modules() if isinstance(m, MixtureOfExperts))
            for mixture, load in zip(mixtures, loads, strict=True):
                mixture.move_bias(load)

    def validation_step(self, block: Tensor, batch_idx: int) -> None:
        """Accumulate nats, weighted by tokens."""
        tokens = block[:, 1:].numel()
        self.val_nats.update(self.loss(block)[0].double() * tokens)
        self.val_tokens.update(torch.full((), tokens, device=block.device))  # a number would be copied from the host

    def on_validation_epoch_end(self) -> None:
        """Log val/loss (nats per token); the callbacks write it against tokens."""
        self.log("val/loss", self.val_nats.compute() / self.val_tokens.compute(), logger=False)
        self.val_nats.reset()
        self.val_tokens.reset()

    def configure_optimizers(self) -> Any:
        """Return the optimizer over the groups, and the schedule by step."""
        optimizer = build_optimizer(self.parameter_groups(self.net), self.optim, self.lr)
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: self.schedule.factor(min(step, total - 1), total)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by the global norm, and keep the norm for the log (one pass over the gradients)."""
        limit = gradient_clip_val or float("inf")  # Lightning's 0 means no clipping
        norm = torch.nn.utils.clip_grad_norm_(self.net.parameters(), limit, foreach=True)
        self.grad_norm = self.nonfinite.check(self, gathered(norm.detach()))
        self.step_lr = float(optimizer.param_groups[0]["lr"])

    def on_train_start(self) -> None:
        """Draw random numbers from where the checkpoint left off, if there is one."""
        if self._rng is not None:
            restore_rng(self._rng, self.global_rank, self.device)
            self._rng = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store what rebuilds the backbone, as plain values that load with weights_only=True."""
        trainer: Any = self.trainer
        progress = {
            "accumulate": trainer.accumulate_grad_batches,
            "skipped_steps": self.nonfinite.skipped,
            "legs": self.legs.at(trainer.global_step, trainer.max_steps),
            "commit": commit(),
            "corpus_hash": trainer.datamodule.manifest.corpus_hash,
            "origin": self.origin,
        }
        checkpoint[CHECKPOINT_KEY] = {"format": FORMAT} | settings_of(self, trainer.datamodule) | progress
        checkpoint[RNG_KEY] = rng_states(self.device)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse to resume under other settings; continue after the saved step on another number of devices."""
        self.check_settings(checkpoint)
        if self.trainer.state.fn == "fit":
            saved = checkpoint[CHECKPOINT_KEY]
            self._rng = checkpoint[RNG_KEY]
            self.nonfinite.skipped = saved["skipped_steps"]
            self.origin = check_origin(saved.get("origin"))
            self.legs.restore(saved.get("legs"))
            restart_between_steps(checkpoint, saved["accumulate"], self.trainer.accumulate_grad_batches)

    def check_settings(self, checkpoint: dict[str, Any]) -> None:
        """Refuse to continue under other settings, see `settings.check_settings`."""
        trainer: Any = self.trainer
        check_settings(checkpoint, self, trainer.datamodule, training=trainer.state.fn == "fit")
