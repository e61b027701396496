"""Values of a wrong type are refused in one sentence that names the key."""

from typing import Any

import pytest

from lightning_sv import PretrainModule, TokenDataModule
from lightning_sv.errors import ConfigError
from lightning_sv.nn import RopeScalingConfig, RouterConfig
from lightning_sv.optim import OptimConfig, ScheduleConfig

ROPE = {"factor": "8", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 64}


@pytest.mark.parametrize(
    ("key", "kind", "arguments"),
    [
        ("model.optim.lr", OptimConfig, {"lr": "1e-3"}),  # as PyYAML reads it
        ("model.optim.eps", OptimConfig, {"eps": None}),
        ("model.schedule.warmup_ratio", ScheduleConfig, {"warmup_ratio": "0.1"}),
        ("model.backbone.router.z_coef", RouterConfig, {"z_coef": "1e-3"}),
        ("model.backbone.rope_scaling.factor", RopeScalingConfig, ROPE),
        ("batch_size", TokenDataModule, {"corpus": "none", "seq_len": 8, "batch_size": "4"}),
    ],
)
def test_wrong_type_is_refused(key: str, kind: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{key} is"):
        kind(**arguments)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("model.optim.lr is", {"lr": "1e-3"}),
        ("model.backbone.d_model is", {"d_model": 32.0}),
        ("model.tokens_per_param is", {"tokens_per_param": "20"}),
        ("argument of OptimConfig 'lrr'", {"optim": {"name": "adamw", "lrr": 1e-3}}),
    ],
)
def test_wrong_argument_of_a_module_is_refused(key: str, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=key):
        PretrainModule.from_preset("tiny", **change)
