"""Settings of the model of a run: backbone, strategy, optimizer, schedule and budget."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from lightning_sv.atomic import regular
from lightning_sv.errors import expect, expect_known
from lightning_sv.nn import Backbone, BackboneConfig, activated_parameters, flops_per_token, meta_backbone
from lightning_sv.optim import OptimConfig, ParameterGroup, ScheduleConfig, configured_groups, role_groups, tuned_lr
from lightning_sv.optim.schedule import SCHEDULES
from lightning_sv.own_code import find
from lightning_sv.scale import ScaleOptions, ScaleStrategy, expand_preset
from lightning_sv.settings.paths import find_config


@dataclass
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
    nonfinite: Literal["stop", "skip"] = "stop"
    seed: int | None = None
    init_from: str | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value, kind = getattr(self, each.name), each.type
            if get_origin(kind) is Literal:
                expect_known(f"model.{each.name}", value, get_args(kind))
            elif isinstance(kind, type) and is_dataclass(kind):
                wanted = f"{kind.__name__}(...), or a dictionary of its arguments."
                expect(isinstance(value, kind), f"model.{each.name}", repr(value), wanted)
        expect(self.seed is None or 0 <= self.seed < 2**63, "model.seed", self.seed, "an integer from 0 to 2^63 - 1.")
        expect(self.tokens_per_param > 0, "model.tokens_per_param", self.tokens_per_param, "a number above 0.")
        scale, self.scale_options = expand_preset(self.scale, self.scale_options)
        self.strategy = ScaleStrategy.parse(scale)
        self.scale = str(scale)  # which a checkpoint holds, not an object
        self.lr = self.optim.lr or tuned_lr(self.backbone.name, self.optim.name, self.schedule.name, self.strategy)
        meta = self.meta()
        self.n_params = sum(p.numel() for p in meta.parameters())
        self.n_activated = activated_parameters(meta, self.backbone)
        self.canonical = meta.canonical
        find(SCHEDULES, self.schedule.name, "model.schedule.name")
        configured_groups(self.parameter_groups(meta), self.optim, self.lr)  # a check; building imports torch._dynamo

    @property
    def label(self) -> str:
        """Strategy and options, as in run names and figures."""
        return f"{self.strategy}{self.scale_options.label()}"

    def meta(self) -> Backbone:
        """Return the backbone on the meta device, for names, sizes and roles."""
        return meta_backbone(self.backbone, self.strategy, self.scale_options)

    def steps_for_budget(self, tokens_per_step: int) -> int:
        """Return the optimizer steps that see `tokens_per_param` tokens per activated parameter, rounded up."""
        return max(1, -int(-self.tokens_per_param * self.n_activated // tokens_per_step))

    def flops_per_token(self, seq_len: int) -> float:
        """Return the floating-point operations of forward and backward per token."""
        return flops_per_token(self.n_activated, self.backbone, seq_len)

    def parameter_groups(self, model: Backbone) -> list[ParameterGroup]:
        """Return the trained parameters of `model`, the built backbone or `meta()`, by role."""
        return role_groups(model, self.strategy.decayed_roles)


def preset(name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a module from base.yaml and model/NAME.yaml of the package's conf, with changes.

    A name that the package lacks may be that of a file in ./conf/model.

    Changes are arguments of `PretrainConfig`, or fields of `BackboneConfig`.

    Raises:
        ConfigError: the file does not exist, or a change is unknown
    """
    from lightning_sv.settings.yaml_file import read_yaml  # imported here, so that a model needs no omegaconf

    sizes = BackboneConfig.__dataclass_fields__
    arguments: dict[str, Any] = {}
    for kind, stem in ((".", "base"), ("optim", "adamw"), ("schedule", "cos"), ("model", name)):
        path = find_config(kind, stem, own_first=False)  # ./conf may be that of a different project
        values: Any = read_yaml(path, str(path)).get("model")
        expect(isinstance(values, dict), f"model in {path}", values, "a mapping, the section of a module.")
        for key, value in values.items():
            old = arguments.get(key)
            arguments[key] = {**old, **value} if isinstance(old, dict) else value
    known = [*(each.name for each in fields(PretrainConfig)), "lr", *sizes]
    for key in sorted(arguments):
        expect_known(f"{find_config('model', name, own_first=False)}: key of model", key, known)
    for key, value in changes.items():
        expect_known("argument", key, known)
        (arguments["backbone"] if key in sizes else arguments)[key] = value
    return arguments


def is_of_transformers(init_from: str) -> bool:
    """Return True if `init_from` is a folder written by transformers' `save_pretrained`."""
    return regular(Path(init_from) / "config.json").is_file()
