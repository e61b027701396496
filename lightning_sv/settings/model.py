"""Settings of the model of a run: backbone, strategy, optimizer, schedule and budget."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from torch.optim import Optimizer

from lightning_sv.errors import ConfigError, expect, expect_known, expect_types
from lightning_sv.nn import (
    Backbone,
    BackboneConfig,
    activated_parameters,
    flops_per_token,
    meta_backbone,
)
from lightning_sv.nn.attention_kernels import AttentionBackend
from lightning_sv.optim import (
    OptimConfig,
    ParameterGroup,
    ScheduleConfig,
    build_optimizer,
    configured_groups,
    role_groups,
    tuned_lr,
)
from lightning_sv.optim.schedule import SCHEDULES
from lightning_sv.own_code import find
from lightning_sv.scale import ScaleOptions, ScaleStrategy, expand_preset
from lightning_sv.settings.paths import find_config


@dataclass(frozen=True)
class PretrainConfig:
    """Settings of `lit.module.PretrainModule`, which documents them."""

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
    seed: int | None = None
    init_from: str | None = None
    attention_backend: AttentionBackend = "auto"

    def __post_init__(self) -> None:
        expect_types("model", self)
        is_seed = self.seed is None or 0 <= self.seed < 2**63
        expect(is_seed, "model.seed", self.seed, "an integer from 0 to 2^63 - 1.")
        budget = self.tokens_per_param
        expect(budget > 0, "model.tokens_per_param", budget, "a number above 0.")
        # A checkpoint and a run's name hold the words and options of a preset, which may change.
        scale, options = expand_preset(self.scale, self.scale_options)
        object.__setattr__(self, "scale", str(scale))
        object.__setattr__(self, "scale_options", options)

    @property
    def strategy(self) -> ScaleStrategy:
        """The strategy that `scale` names."""
        return ScaleStrategy.parse(self.scale)

    @property
    def label(self) -> str:
        """Strategy and options, as in run names and figures."""
        return f"{self.strategy}{self.scale_options.label()}"

    @cached_property
    def plan(self) -> "ModelPlan":
        """What follows from the settings; raises `ConfigError` if they do not fit each other."""
        return ModelPlan(self)


class ModelPlan:
    """Parameters, groups, FLOPs and learning rate of a model that is not built yet.

    Args:
        config: settings of the model

    Attributes:
        lr: peak learning rate
        n_params: number of parameters
        n_activated: number of parameters that process a token
        canonical: strategy without words that have no effect on this model

    Raises:
        ConfigError: a strategy, option or optimizer that does not fit the model, or no known
            learning rate
    """

    def __init__(self, config: PretrainConfig):
        self._config = config
        strategy = config.strategy
        rate_names = config.backbone.name, config.optim.name, config.schedule.name
        self.lr = config.optim.lr or tuned_lr(*rate_names, strategy)
        meta = self.meta()
        self.n_params = sum(parameter.numel() for parameter in meta.parameters())
        self.n_activated = activated_parameters(meta, config.backbone)
        self.canonical = meta.canonical
        self._check(meta)

    def _check(self, meta: Backbone) -> None:
        """Check that schedule and optimizer exist, and that the settings name roles of the model.

        The optimizer is not built, because that would import torch._dynamo.
        """
        config = self._config
        find(SCHEDULES, config.schedule.name, "model.schedule.name")
        configured_groups(self.parameter_groups(meta), config.optim, self.lr)

    def meta(self) -> Backbone:
        """Return the backbone on the meta device, for names, sizes and roles."""
        config = self._config
        return meta_backbone(config.backbone, config.strategy, config.scale_options)

    def steps_for_budget(self, tokens_per_step: int) -> int:
        """Return the steps for `tokens_per_param` tokens per activated parameter, rounded up."""
        tokens = self._config.tokens_per_param * self.n_activated
        return max(1, -int(-tokens // tokens_per_step))

    def flops_per_token(self, seq_len: int) -> float:
        """Return the floating-point operations of forward and backward per token."""
        return flops_per_token(self.n_activated, self._config.backbone, seq_len)

    def optimizer(self, model: Backbone) -> Optimizer:
        """Return the optimizer of `model`, the built backbone or `meta()`."""
        return build_optimizer(self.parameter_groups(model), self._config.optim, self.lr)

    def parameter_groups(self, model: Backbone) -> list[ParameterGroup]:
        """Return the trained parameters of `model`, the built backbone or `meta()`, by role."""
        return role_groups(model, self._config.strategy.decayed_roles)


def preset(name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a module from base.yaml and model/NAME.yaml, with changes.

    The files are those of the package's conf; one that it lacks may be in ./conf.

    Args:
        name: name of the file in conf/model
        changes: arguments of `PretrainConfig`, or fields of `BackboneConfig`

    Raises:
        ConfigError: the file does not exist, or a change is unknown
    """
    arguments: dict[str, Any] = {}
    for kind, stem in ((".", "base"), ("optim", "adamw"), ("schedule", "cos"), ("model", name)):
        _merge(arguments, _model_section(kind, stem))
    sizes = BackboneConfig.__dataclass_fields__
    known = [*PretrainConfig.__dataclass_fields__, "lr", *sizes]
    for key in sorted(arguments):
        expect_known(f"conf/model/{name}.yaml: key of model", key, known)
    for key in changes:
        expect_known("argument", key, known)

    for key, value in changes.items():
        section = arguments["backbone"] if key in sizes else arguments
        section[key] = value
    return arguments


def _merge(arguments: dict[str, Any], later: Mapping[str, Any]) -> None:
    """Add the arguments of a later file, which replace single keys of a section."""
    for key, value in later.items():
        earlier = arguments.get(key)
        if isinstance(earlier, dict):
            value = {**earlier, **value}
        arguments[key] = value


def _model_section(kind: str, stem: str) -> dict[str, Any]:
    from lightning_sv.settings.yaml_file import read_yaml  # so that a model needs no omegaconf

    path = find_config(kind, stem, own_first=False)  # ./conf may be that of a different project
    values = read_yaml(path, str(path)).get("model")
    if not isinstance(values, dict):
        raise ConfigError(f"model in {path} is {values}; expected the section of a module.")
    return values
