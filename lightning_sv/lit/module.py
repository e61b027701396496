"""The LightningModule: a backbone, its loss, its optimizer and schedule."""

from dataclasses import asdict
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import MeanMetric

from lightning_sv.lit.load import CHECKPOINT_KEY
from lightning_sv.nn import (
    Backbone,
    BackboneConfig,
    MixtureOfExperts,
    Routing,
    activated_parameters,
    document_numbers,
    flops_per_token,
    meta_backbone,
    next_token_loss,
    router_loss,
)
from lightning_sv.optim import (
    OptimConfig,
    ParameterGroup,
    ScheduleConfig,
    build_optimizer,
    parameter_groups,
    tuned_lr,
)
from lightning_sv.scale import ScaleOptions, ScaleStrategy


class PretrainModule(L.LightningModule):
    """Pre-trains a backbone with a scale-vector strategy.

    Args:
        backbone: the sizes.
        scale: the strategy: tokens joined by '+', one per axis (shared hg / nop bp ap dp dnp /
            direct offset or er / wd iwd owd nowd), or a preset (llama, unified).
        scale_options: finer choices of the strategy.
        optim: the optimizer.
        schedule: the learning rate over the steps.
        tokens_per_param: the training budget per activated parameter, from which trainer.max_steps
            follows unless that is set; 100 in the paper.
        mask_documents: keep attention inside a document of a packed sequence (the paper does not
            say; attention across is the default).
        compile: compile the backbone with torch.compile.
        seed: of the initialization; null for seed_everything's.

    Raises:
        ValueError: a strategy, option or optimizer that does not fit the model, or no learning rate known.
    """

    def __init__(
        self,
        backbone: BackboneConfig,
        scale: str = "llama",
        scale_options: ScaleOptions = ScaleOptions(),  # noqa: B008 (frozen)
        optim: OptimConfig = OptimConfig(),  # noqa: B008
        schedule: ScheduleConfig = ScheduleConfig(),  # noqa: B008
        tokens_per_param: float = 100.0,
        mask_documents: bool = False,
        compile: bool = False,
        seed: int | None = None,
    ):
        super().__init__()
        if tokens_per_param <= 0:
            raise ValueError(f"model.tokens_per_param is {tokens_per_param}; it must be positive.")
        self.config = backbone
        self.strategy = ScaleStrategy.parse(scale)
        self.scale_options = scale_options
        self.optim = optim
        self.schedule = schedule
        self.tokens_per_param = tokens_per_param
        self.mask_documents, self.compile_backbone, self.seed = mask_documents, compile, seed
        self.lr = self.optim.lr or tuned_lr(backbone.name, self.optim.name, self.schedule.name, self.strategy)
        # Before any data is touched: strategy and optimizer fit the sizes, and the number of parameters.
        meta = meta_backbone(backbone, self.strategy, self.scale_options)
        self.n_params = sum(p.numel() for p in meta.parameters())
        #: of which one token uses; a sparse expert counts by the share of tokens it sees
        self.n_activated = activated_parameters(meta, backbone)
        self.meaning = meta.meaning
        build_optimizer(parameter_groups(meta, self.strategy.decayed_roles), self.optim, self.lr)
        self.backbone: Backbone | None = None
        self.val_nats = MeanMetric(nan_strategy="disable")  # a NaN must show
        #: norm of the last gradient before clipping, over all parameters
        self.grad_norm: Tensor | None = None
        #: (blocks, experts) tokens of each expert in the micro-batches since the last step
        self._loads: Tensor | None = None
        #: learning rate of the last step (the scheduler has moved on when callbacks see the optimizer)
        self.step_lr = self.lr

    @property
    def label(self) -> str:
        """Strategy and options, as in run names and figures."""
        return f"{self.strategy}{self.scale_options.label()}"

    @property
    def net(self) -> Backbone:
        """The backbone, which exists from `configure_model` on."""
        assert self.backbone is not None, "configure_model has not run"
        return self.backbone

    def configure_model(self) -> None:
        """Build and initialize the backbone; Lightning calls this before sharding."""
        if self.backbone is not None:
            return
        seed = torch.initial_seed() if self.seed is None else self.seed
        self.backbone = Backbone(self.config, self.strategy, self.scale_options, seed=seed)
        if self.compile_backbone:
            self.backbone.compile()  # in place: the checkpoint's keys stay clean

    def steps_for_budget(self, tokens_per_step: int) -> int:
        """Return the optimizer steps that see `tokens_per_param` tokens per activated parameter, rounded up."""
        return max(1, -int(-self.tokens_per_param * self.n_activated // tokens_per_step))

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations of forward and backward a token."""
        return flops_per_token(self.net, self.config, seq_len)

    def loss(self, block: Tensor) -> tuple[Tensor, list[Routing]]:
        """Mean next-token loss in nats per token of a (B, T + 1) block of token ids, and the routings."""
        tokens, targets = block[:, :-1], block[:, 1:]
        documents = None
        if self.mask_documents:
            datamodule: Any = self.trainer.datamodule  # type: ignore[attr-defined]
            documents = document_numbers(tokens, datamodule.eot)
        logits, routings = self.net(tokens, documents, with_routing=True)
        return next_token_loss(logits, targets), routings

    def training_step(self, block: Tensor, batch_idx: int) -> dict[str, Any]:
        """Return the loss of one micro-batch, its part in nats per token, and the routings."""
        nats, routings = self.loss(block)
        if routings and self.config.router.balance == "bias":
            loads = torch.stack([routing.load for routing in routings])
            self._loads = loads if self._loads is None else self._loads + loads
        loss = nats + router_loss(routings, self.config)
        return {"loss": loss, "nats": nats.detach(), "routings": [routing.detach() for routing in routings]}

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Step, then move the experts' biases by the loads of the step's micro-batches on all devices."""
        super().optimizer_step(*args, **kwargs)
        if self._loads is not None:
            loads, self._loads = self.trainer.strategy.reduce(self._loads, reduce_op="sum"), None
            assert isinstance(loads, Tensor)
            mixtures = (m for m in self.net.modules() if isinstance(m, MixtureOfExperts))
            for mixture, load in zip(mixtures, loads, strict=True):
                mixture.move_bias(load)

    def validation_step(self, block: Tensor, batch_idx: int) -> None:
        """Accumulate nats, weighted by tokens."""
        self.val_nats.update(self.loss(block)[0], weight=block.shape[0] * (block.shape[1] - 1))

    def on_validation_epoch_end(self) -> None:
        """Log val/loss (nats per token); the callbacks write it against tokens."""
        self.log("val/loss", self.val_nats.compute(), logger=False)
        self.val_nats.reset()

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return the trained parameters by role, and which roles decay."""
        return parameter_groups(self.net, self.strategy.decayed_roles)

    def configure_optimizers(self) -> Any:
        """Return the optimizer over the groups, and the schedule by step."""
        optimizer = build_optimizer(self.parameter_groups(), self.optim, self.lr)
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
        self.grad_norm = norm.detach()
        self.step_lr = float(optimizer.param_groups[0]["lr"])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store what rebuilds the backbone, as plain values that load with weights_only=True."""
        checkpoint[CHECKPOINT_KEY] = self._settings()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse to resume under other settings: the optimizer's state would silently win over them.

        Raises:
            ValueError: names the first key that differs, and both values.
        """
        saved = checkpoint.get(CHECKPOINT_KEY)
        if not isinstance(saved, dict):
            raise ValueError(f"the checkpoint was not written by lightning_sv: it has no {CHECKPOINT_KEY!r} entry.")
        keys: tuple[str, ...] = ("backbone", "scale", "scale_options", "mask_documents")
        if self.trainer.state.fn == "fit":
            keys = (*keys, "optim", "schedule", "data")
        here = self._settings()
        for key in keys:
            where, then, now = _first_difference(key, saved.get(key), here[key])
            if then != now:
                raise ValueError(
                    f"the checkpoint was trained with {where} = {then}, this run has {now}; resume with the same "
                    "settings, or start a new run."
                )

    def _settings(self) -> dict[str, Any]:
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        return {
            "backbone": asdict(self.config),
            "scale": str(self.strategy),
            "scale_options": asdict(self.scale_options),
            "mask_documents": self.mask_documents,
            "optim": asdict(self.optim) | {"lr": self.lr},
            "schedule": asdict(self.schedule),
            "data": {"seq_len": data.seq_len, "global_batch": data.global_batch},
        }


def _first_difference(key: str, then: Any, now: Any) -> tuple[str, Any, Any]:
    """Return the dotted key and both values where two settings first differ; the values are equal if they do not."""
    if isinstance(then, dict) and isinstance(now, dict):
        for name in dict.fromkeys([*now, *then]):
            if then.get(name) != now.get(name):
                return _first_difference(f"{key}.{name}", then.get(name), now.get(name))
    return key, then, now
