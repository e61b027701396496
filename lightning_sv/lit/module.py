"""LightningModule: backbone, loss, optimizer and schedule."""

from dataclasses import asdict, replace
from inspect import signature
from typing import Any, Literal, Self

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from lightning_sv.lit.backbone_module import BackboneModule
from lightning_sv.lit.batch import check_block, documents_of
from lightning_sv.lit.build import config_from, warn_untrained, with_schedule
from lightning_sv.lit.clipping import clip_step
from lightning_sv.lit.guards.exact_resume import ExactResume
from lightning_sv.lit.guards.expert_bias import ExpertBias, with_total_loads
from lightning_sv.lit.guards.finite import FiniteGuard
from lightning_sv.lit.losses import EvaluationLoss, log_training_loss
from lightning_sv.lit.supported import StartCheck, check_supported
from lightning_sv.nn import BackboneConfig, Routing, router_loss
from lightning_sv.nn.attention_kernels import AttentionBackend
from lightning_sv.optim import OptimConfig, ScheduleConfig
from lightning_sv.scale import ScaleOptions
from lightning_sv.settings.model import PretrainConfig, preset


class PretrainModule(BackboneModule):
    """Pre-train a Llama, LlamaMoE or Gemma backbone with a scale-vector strategy, for any Trainer.

    A batch is a (B, T + 1) tensor of token ids. Logs train/loss, val/loss, test/loss in nats per
    token, and val/perplexity, test/perplexity. Hyper-parameters are saved as plain values, so
    `load_from_checkpoint(path)` rebuilds the module.

    Args:
        backbone: sizes of the model
        scale: strategy: words joined by '+', one per axis (shared hg / nop bp ap dp dnp / direct,
            offset, or, er / wd iwd owd nowd), or a preset (llama, unified, unified-head-dp)
        scale_options: further options of the strategy
        optim: optimizer settings
        schedule: learning-rate schedule over the Trainer's steps; constant if only max_time ends
            the run
        tokens_per_param: training budget of the command line, in tokens per activated parameter;
            100 in the paper
        mask_documents: restrict attention to a document of a packed sequence, with a
            `TokenDataModule` (not stated in the paper)
        compile: torch.compile mode: 'none', 'model' (the backbone as one graph) or 'block' (each
            block and the head)
        activation_checkpointing: save only the blocks' inputs for backward, and recompute the
            blocks there
        residual: dtype of the residual stream under bf16-mixed: 'wide' for float32; 'narrow' for
            bf16, with less memory and different rounding
        seed: seed of the initialization; None for that of seed_everything
        init_from: checkpoint or run directory with the initial weights, read by the command line;
            optimizer, steps and tokens start from zero
        lr: peak learning rate, overriding optim.lr
        attention_backend: kernel of attention on a GPU: 'cudnn', 'flash', 'efficient' or 'math';
            'auto' for the first of them that supports the model, without cuDNN's under
            trainer.deterministic

    Attributes:
        settings: these arguments; `settings.plan` has the number of parameters, groups, FLOPs and
            the learning rate

    Raises:
        ConfigError: a strategy, option or optimizer that does not fit the model, or no known
            learning rate
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
        seed: int | None = None,
        init_from: str | None = None,
        lr: float | None = None,
        attention_backend: AttentionBackend = "auto",
    ):
        optim = config_from(OptimConfig, optim)
        if lr is not None and isinstance(optim, OptimConfig):
            optim = replace(optim, lr=lr)
        settings = PretrainConfig(
            backbone=config_from(BackboneConfig, backbone),
            scale=scale,
            scale_options=config_from(ScaleOptions, scale_options),
            optim=optim,
            schedule=config_from(ScheduleConfig, schedule),
            tokens_per_param=tokens_per_param,
            mask_documents=mask_documents,
            compile=compile,
            activation_checkpointing=activation_checkpointing,
            residual=residual,
            seed=seed,
            init_from=init_from,
            attention_backend=attention_backend,
        )
        _ = settings.plan  # refuses settings that do not fit each other
        super().__init__(settings)
        self.save_hyperparameters(asdict(settings))

        #: (blocks, experts) tokens of the last `training_loss` on all devices; None if dense
        self.expert_loads: Tensor | None = None
        self._evaluated = EvaluationLoss()
        self.nonfinite = FiniteGuard()
        self.expert_bias = ExpertBias()
        self.exact_resume = ExactResume()

    @classmethod
    def from_preset(cls, name: str, /, **changes: Any) -> Self:
        """Create a module for a model in conf/model, e.g. 'tiny', 'mini' or 'llama-0.12b'.

        Args:
            name: name of the file in conf/model
            **changes: further arguments of the module or subclass; fields of the backbone are given
                as `d_model=64`

        Raises:
            ConfigError: an unknown preset or argument
        """
        own_names = signature(cls).parameters.keys() - signature(PretrainModule).parameters.keys()
        own = {key: changes.pop(key) for key in own_names & changes.keys()}
        return cls(**preset(name, changes), **own)

    def configure_callbacks(self) -> list[L.Callback]:
        """Bring the callbacks that guard a run; a subclass adds its own to them."""
        if self.trainer.state.fn == "fit":
            check_supported(self)  # here, because later hooks follow those of other callbacks
        return [StartCheck(), self.nonfinite, self.expert_bias, self.exact_resume]

    @property
    def lr(self) -> float:
        """Peak learning rate."""
        return self.settings.plan.lr

    # Losses

    def loss(self, block: Tensor) -> tuple[Tensor, list[Routing]]:
        """Return the next-token loss in nats per token of a (B, T + 1) block, and the routings."""
        block = check_block(block, self.settings.backbone.vocab_size)
        tokens = block[:, :-1]
        targets = block[:, 1:]
        documents = None
        if self.settings.mask_documents:
            documents = documents_of(tokens, self._trainer)
        return self.net(tokens, documents, targets=targets, with_routing=True)

    def training_loss(self, block: Tensor) -> tuple[Tensor, Tensor, list[Routing]]:
        """Return the loss that is minimized, the next-token loss in it, and the routings.

        It adds the losses of the routers, and counts the tokens of each expert on all devices, by
        which `ExpertBias` moves the biases. Call it in a `training_step` of your own.
        """
        nats, routings = self.loss(block)
        routings, self.expert_loads = with_total_loads(routings)
        return nats + router_loss(routings, self.settings.backbone), nats.detach(), routings

    def training_step(self, block: Tensor, batch_idx: int) -> dict[str, Any]:
        """Return loss, next-token loss and routings of one micro-batch; log train/loss."""
        loss, nats, routings = self.training_loss(block)
        log_training_loss(self, nats, batch_size=len(block))
        return {"loss": loss, "nats": nats, "routings": [each.detach() for each in routings]}

    def validation_step(self, block: Tensor, batch_idx: int) -> None:
        """Accumulate the loss."""
        nats, _ = self.loss(block)
        self._evaluated.add(nats, n_tokens=block[:, 1:].numel())

    test_step = validation_step

    def on_validation_epoch_start(self) -> None:
        """Drop the sums of a validation that was interrupted."""
        self._evaluated = EvaluationLoss()

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self) -> None:
        """Log val/loss and val/perplexity; in a test, test/loss and test/perplexity."""
        self._evaluated.log(self)

    on_test_epoch_end = on_validation_epoch_end

    # Optimization

    def configure_optimizers(self) -> Any:
        """Return the optimizer and its per-step schedule."""
        optimizer = self.settings.plan.optimizer(self.net)
        warn_untrained(self, optimizer)
        return with_schedule(optimizer, self.settings.schedule, self.trainer)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by the norm of all gradients, or per role in `optim.clip_by_role`."""
        clip_step(self, optimizer, gradient_clip_val)

    @property
    def grad_norm(self) -> float | None:
        """Global norm of the gradient of the last step before clipping."""
        return self.nonfinite.norm

    @property
    def own_optimizer(self) -> str | None:
        """Name of a subclass with its own `configure_optimizers`; else None."""
        is_own = is_overridden("configure_optimizers", self, PretrainModule)
        return type(self).__name__ if is_own else None
