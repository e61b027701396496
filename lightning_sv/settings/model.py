"""What a run trains: a backbone, its strategy, optimizer, schedule and budget. Without Lightning."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lightning_sv.errors import ConfigError, unknown
from lightning_sv.nn import (
    Backbone,
    BackboneConfig,
    activated_parameters,
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
from lightning_sv.settings.paths import find_config
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


def preset(name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a module: those of conf/base.yaml, conf/model/NAME.yaml and its optimizer, changed.

    Args:
        name: of the file in conf/model, in the working directory or else in the package
        changes: arguments of `Pretraining`, or fields of `BackboneConfig`

    Raises:
        ConfigError: there is no such file, or a change is neither
    """
    from lightning_sv.settings.yaml_file import read_yaml  # here: a model is built without omegaconf

    fields = BackboneConfig.__dataclass_fields__
    arguments: dict[str, Any] = {}
    for kind, stem in ((".", "base"), ("optim", "adamw"), ("schedule", "cos"), ("model", name)):
        path = find_config(kind, stem)
        for key, value in read_yaml(path, str(path)).get("model", {}).items():
            old = arguments.get(key)
            arguments[key] = {**old, **value} if isinstance(old, dict) else value
    known = [*inspect.signature(Pretraining).parameters, "lr", *fields]
    for key, value in changes.items():
        if key not in known:
            raise ConfigError(unknown("argument", key, known))
        (arguments["backbone"] if key in fields else arguments)[key] = value
    return arguments


def is_of_transformers(init_from: str) -> bool:
    """Whether a run's `init_from` is a folder as transformers' `save_pretrained` writes it."""
    return regular(Path(init_from) / "config.json").is_file()
