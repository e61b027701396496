"""What a run trains: a backbone, its strategy, optimizer, schedule and budget. Without Lightning."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from lightning_sv.atomic import regular
from lightning_sv.errors import ConfigError, unknown
from lightning_sv.nn import Backbone, BackboneConfig, activated_parameters, flops_per_token, meta_backbone
from lightning_sv.nn.kernels.select import Kernels
from lightning_sv.optim import OptimConfig, ParameterGroup, ScheduleConfig, configured_groups, role_groups, tuned_lr
from lightning_sv.scale import ScaleOptions, ScaleStrategy
from lightning_sv.settings.paths import find_config


@dataclass
class PretrainConfig:
    """What is pre-trained, how, and for how long: the settings of `lit.module.PretrainModule`, which explains them.

    Raises:
        ConfigError: a strategy, option or optimizer that does not fit the model, or no learning rate known
    """

    backbone: BackboneConfig
    scale: str = "llama"
    scale_options: ScaleOptions = field(default_factory=ScaleOptions)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    tokens_per_param: float = 100.0
    mask_documents: bool = False
    compile: Literal["none", "model", "block"] = "none"
    activation_checkpointing: bool = False
    residual: Literal["wide", "narrow"] = "wide"
    kernels: Kernels = "plain"
    nonfinite: Literal["stop", "skip"] = "stop"
    seed: int | None = None
    init_from: str | None = None

    def __post_init__(self) -> None:
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ConfigError(f"model.seed is {self.seed}; expected a whole number from 0 to 2^63 - 1.")
        if self.tokens_per_param <= 0:
            raise ConfigError(f"model.tokens_per_param is {self.tokens_per_param}; expected a number above 0.")
        self.strategy = ScaleStrategy.parse(self.scale)
        self.lr = self.optim.lr or tuned_lr(self.backbone.name, self.optim.name, self.schedule.name, self.strategy)
        meta = self.meta()
        self.n_params = sum(p.numel() for p in meta.parameters())
        self.n_activated = activated_parameters(meta, self.backbone)
        self.canonical = meta.canonical
        configured_groups(self.parameter_groups(meta), self.optim, self.lr)  # a check; building imports torch._dynamo

    def plain(self) -> dict[str, Any]:
        """Return the arguments as plain values."""
        own = {key: getattr(self, key).settings() for key in ("backbone", "scale_options", "optim")}
        return asdict(self) | own

    @property
    def label(self) -> str:
        """Strategy and options, as in run names and figures."""
        return f"{self.strategy}{self.scale_options.label()}"

    def meta(self) -> Backbone:
        """Return the backbone without storage: names, sizes and roles before anything is built or sharded."""
        return meta_backbone(self.backbone, self.strategy, self.scale_options)

    def steps_for_budget(self, tokens_per_step: int) -> int:
        """Return the optimizer steps that see `tokens_per_param` tokens per activated parameter, rounded up."""
        return max(1, -int(-self.tokens_per_param * self.n_activated // tokens_per_step))

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations of forward and backward a token."""
        return flops_per_token(self.n_activated, self.backbone, seq_len)

    def parameter_groups(self, model: Backbone) -> list[ParameterGroup]:
        """Return the trained parameters of `model`, this module's backbone or `meta()`, by role."""
        return role_groups(model, self.strategy.decayed_roles)


def preset(name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a module: those of conf/base.yaml, conf/model/NAME.yaml and its optimizer, changed.

    Args:
        name: of the file in conf/model, in the working directory or else in the package
        changes: arguments of `PretrainConfig`, or fields of `BackboneConfig`

    Raises:
        ConfigError: there is no such file, or a change is neither
    """
    from lightning_sv.settings.yaml_file import read_yaml  # here: a model is built without omegaconf

    sizes = BackboneConfig.__dataclass_fields__
    arguments: dict[str, Any] = {}
    for kind, stem in ((".", "base"), ("optim", "adamw"), ("schedule", "cos"), ("model", name)):
        path = find_config(kind, stem)
        for key, value in read_yaml(path, str(path)).get("model", {}).items():
            old = arguments.get(key)
            arguments[key] = {**old, **value} if isinstance(old, dict) else value
    known = [*(each.name for each in fields(PretrainConfig)), "lr", *sizes]
    for key, value in changes.items():
        if key not in known:
            raise ConfigError(unknown("argument", key, known))
        (arguments["backbone"] if key in sizes else arguments)[key] = value
    return arguments


def is_of_transformers(init_from: str) -> bool:
    """Whether a run's `init_from` is a folder as transformers' `save_pretrained` writes it."""
    return regular(Path(init_from) / "config.json").is_file()
