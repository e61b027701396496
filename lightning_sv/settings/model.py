"""What a run trains: a backbone, its strategy, optimizer, schedule and budget. Without Lightning."""

from pathlib import Path
from typing import Literal

from torch import Tensor

from lightning_sv.errors import ConfigError
from lightning_sv.nn import (
    Backbone,
    BackboneConfig,
    Routing,
    activated_parameters,
    document_numbers,
    flops_per_token,
    meta_backbone,
)
from lightning_sv.nn.kernels.use import Kernels
from lightning_sv.optim import (
    OptimConfig,
    ParameterGroup,
    ScheduleConfig,
    build_optimizer,
    parameter_groups,
    tuned_lr,
)
from lightning_sv.scale import ScaleOptions, ScaleStrategy
from lightning_sv.whole import regular


class Pretraining:
    """What is pre-trained, how, and for how long; `lit.module.PretrainModule` is the LightningModule of it.

    Args:
        backbone: the sizes
        scale: the strategy: tokens joined by '+', one per axis (shared hg / nop bp ap dp dnp /
            direct offset or er / wd iwd owd nowd), or a preset (llama, unified)
        scale_options: finer choices of the strategy
        optim: the optimizer
        schedule: the learning rate over the steps
        tokens_per_param: the training budget per activated parameter, from which trainer.max_steps
            follows unless that is set; 100 in the paper
        mask_documents: keep attention inside a document of a packed sequence (the paper does not
            say; attention across is the default)
        compile: with torch.compile: 'none'; 'model', the whole backbone; 'block', each block and the head
            apart, which FSDP2 needs and which compiles in the time of one block
        activation_checkpointing: keep only the blocks' inputs for backward, and run them again there
        residual: dtype of the residual stream under trainer.precision bf16-mixed: 'wide' is float32; 'narrow' is bf16,
            less memory and fewer bytes for other rounding. The same elsewhere
        kernels: what normalizes q, k, v, gate and up: 'plain', PyTorch; 'triton', kernels for a CUDA device, which
            move fewer bytes by count and have not been timed on one yet
        nonfinite: what to do where a loss or gradient is not finite: 'stop', before the step and with the
            batch's identity saved; 'skip' the step and record it (which biases comparisons)
        seed: of the initialization; null for seed_everything's
        init_from: a checkpoint or a run directory whose weights it starts from: the same model and tokenizer; another
            learning rate, schedule, decay or text. The optimizer, and steps and tokens, begin anew. Or the folder of a
            Llama, Mistral, Qwen 3 or Gemma 3 of transformers, whose sizes it takes too; any strategy without dnp. null
            for none

    Raises:
        ConfigError: a strategy, option or optimizer that does not fit the model, or no learning rate known
    """

    def __init__(  # noqa: PLR0913 (the keys of `model` in a config)
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
        kernels: Kernels = "plain",
        nonfinite: Literal["stop", "skip"] = "stop",
        seed: int | None = None,
        init_from: str | None = None,
    ):
        super().__init__()  # LightningModule's, where this is one
        if tokens_per_param <= 0:
            raise ConfigError(f"model.tokens_per_param is {tokens_per_param}; it must be positive.")
        self.config, self.strategy, self.scale_options = backbone, ScaleStrategy.parse(scale), scale_options
        self.optim, self.schedule, self.tokens_per_param = optim, schedule, tokens_per_param
        self.mask_documents, self.compile_how, self.seed = mask_documents, compile, seed
        self.init_from = init_from
        self.activation_checkpointing = activation_checkpointing
        self.residual, self.kernels = residual, kernels
        self.when_nonfinite = nonfinite
        self.lr = self.optim.lr or tuned_lr(backbone.name, self.optim.name, self.schedule.name, self.strategy)
        # Before any data is touched: strategy and optimizer fit the sizes, and the number of parameters.
        meta = self.meta()
        #: parameters, and those that one token uses: a sparse expert counts by the share of tokens it sees
        self.n_params, self.n_activated = (
            sum(p.numel() for p in meta.parameters()),
            activated_parameters(meta, backbone),
        )
        self.canonical = meta.canonical
        build_optimizer(self.parameter_groups(meta), self.optim, self.lr)

    @property
    def label(self) -> str:
        """Strategy and options, as in run names and figures."""
        return f"{self.strategy}{self.scale_options.label()}"

    def meta(self) -> Backbone:
        """Return the backbone without storage: names, sizes and roles before anything is built or sharded."""
        return meta_backbone(self.config, self.strategy, self.scale_options)

    def steps_for_budget(self, tokens_per_step: int) -> int:
        """Return the optimizer steps that see `tokens_per_param` tokens per activated parameter, rounded up."""
        return max(1, -int(-self.tokens_per_param * self.n_activated // tokens_per_step))

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations of forward and backward a token."""
        return flops_per_token(self.n_activated, self.config, seq_len)

    def parameter_groups(self, model: Backbone) -> list[ParameterGroup]:
        """Return the trained parameters of `model`, this module's backbone or `meta()`, by role."""
        return parameter_groups(model, self.strategy.decayed_roles)

    def nats(self, net: Backbone, block: Tensor, eot: int | None = None) -> tuple[Tensor, list[Routing]]:
        """Mean next-token loss in nats per token of a (B, T + 1) block of token ids, and the routings.

        Args:
            net: the backbone
            block: the token ids
            eot: id of the end-of-text token, where attention stays inside a document
        """
        tokens, targets = block[:, :-1], block[:, 1:]
        documents = None if eot is None else document_numbers(tokens, eot)
        out: tuple[Tensor, list[Routing]] = net(tokens, documents, targets=targets, with_routing=True)
        return out


def is_of_transformers(init_from: str) -> bool:
    """Whether a run's `init_from` is a folder as transformers' `save_pretrained` writes it."""
    return regular(Path(init_from) / "config.json").is_file()
