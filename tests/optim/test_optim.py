"""Groups partition the parameters by role; the schedule is the paper's."""

import itertools
import math

import pytest
from torch import nn

from lightning_sv import Backbone, BackboneConfig, ScaleStrategy
from lightning_sv.optim import OptimConfig, ScheduleConfig, adamw, parameter_groups, tuned_lr
from tests.conftest import ALL_STRATEGIES


@pytest.mark.filterwarnings("ignore:scale strategy")
@pytest.mark.parametrize("text", ALL_STRATEGIES)
def test_groups_partition_by_role_and_decay(text: str, config: BackboneConfig) -> None:
    strategy = ScaleStrategy.parse(text)
    model = Backbone(config, strategy)
    groups = parameter_groups(model, strategy.decayed_roles)
    names = [m.name for g in groups for m in g.members]
    assert sorted(names) == sorted(n for n, _ in model.named_parameters())
    for group in groups:
        for member in group.members:
            if group.role == "matrix":
                assert member.parameter.ndim == 2 and "_proj" in member.name
            elif group.role == "head":
                assert member.name == "head.lm_head.weight"
            elif group.role in ("input", "output"):
                side = "output" if "scale_out" in member.name else "input"
                assert (group.role, group.decays) == (side, side in strategy.decayed_roles)
    optimizer = adamw(groups, OptimConfig(), 1e-3)
    decays = {g["role"]: g["weight_decay"] for g in optimizer.param_groups}
    assert decays["matrix"] == decays["embedding"] == 0.1
    if text.endswith("+iwd") and "dnp" in text:
        assert (decays["input"], decays["output"]) == (0.1, 0.0)


def test_a_parameter_without_a_role_is_refused() -> None:
    with pytest.raises(ValueError, match=r"parameter 1.weight of LayerNorm has no role"):
        parameter_groups(nn.Sequential(nn.Linear(2, 2, bias=False), nn.LayerNorm(2)), frozenset())


def test_frozen_parameters_stay_out(config: BackboneConfig) -> None:
    model = Backbone(config)
    model.embed.weight.requires_grad_(False)
    assert "embedding" not in {g.role for g in parameter_groups(model, frozenset())}


@pytest.mark.parametrize("total", [10, 1000, 24_361])
def test_cosine_schedule(total: int) -> None:
    schedule = ScheduleConfig(warmup_ratio=0.1)
    factors = [schedule.factor(step, total) for step in range(total)]
    warmup = round(0.1 * total)
    assert max(factors) == factors[warmup] == 1.0
    assert factors[-1] == pytest.approx(0.05)
    steps = [b - a for a, b in itertools.pairwise(factors[:warmup])]
    assert all(step == pytest.approx(1 / (warmup + 1)) for step in steps)
    assert all(a >= b for a, b in itertools.pairwise(factors[warmup:]))
    for step in range(warmup, total):  # the closed form, which no other decay meets
        p = (step - warmup) / (total - 1 - warmup)
        assert factors[step] == pytest.approx(0.05 + 0.95 * (1 + math.cos(math.pi * p)) / 2, abs=1e-12)


@pytest.mark.parametrize("kwargs", [{"name": "linear"}, {"warmup_ratio": 1.0}, {"final_ratio": -0.1}])
def test_schedule_errors(kwargs: dict) -> None:
    with pytest.raises(ValueError, match="model.schedule"):
        ScheduleConfig(**kwargs)


def test_tuned_learning_rates() -> None:
    assert tuned_lr("llama-0.12b", "adamw", "cos", ScaleStrategy.parse("unified")) == 4e-3
    assert tuned_lr("llama-0.12b", "adamw", "cos", ScaleStrategy.parse("nop")) == 2e-3
    with pytest.raises(ValueError, match="set model.optim.lr, or use one of: llama-0.12b adamw cos"):
        tuned_lr("custom", "adamw", "cos", ScaleStrategy())


def test_optim_errors() -> None:
    for kwargs in ({"lr": 0.0}, {"weight_decay": -1.0}, {"name": "sgd"}):
        with pytest.raises(ValueError, match="model.optim"):
            OptimConfig(**kwargs)
