"""Groups of parameters by role, settings, tuned learning rates and schedules."""

import math
from collections.abc import Collection
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_sv import Backbone, BackboneConfig, ScaledLinear, ScaleStrategy
from lightning_sv.errors import ConfigError
from lightning_sv.optim import (
    OPTIMIZERS,
    OptimConfig,
    ScheduleConfig,
    build_optimizer,
    group_table,
    role_groups,
)
from lightning_sv.optim.tuned import tuned_lr
from lightning_sv.scale.strategy import DECAYS
from tests.conftest import EVERY_BUILD


def expected_role(name: str) -> str:
    """Return the role of a parameter of a dense Llama."""
    if "scale" in name:
        return "output" if "scale_out" in name else "input"
    if name == "head.lm_head.weight":
        return "head"
    return "matrix" if "_proj" in name else "embedding"


@pytest.mark.parametrize("text", EVERY_BUILD)
def test_role_groups_partition_parameters_by_role_and_decay(
    text: str, config: BackboneConfig
) -> None:
    model = Backbone(config, text)
    for decayed in (row.roles for row in DECAYS.values()):
        groups = role_groups(model, decayed)
        roles = {}
        for group in groups:
            assert group.decays == (group.role in decayed or group.role not in ("input", "output"))
            for member in group.members:
                assert member.name not in roles
                roles[member.name] = group.role
        assert roles == {name: expected_role(name) for name, _ in model.named_parameters()}
        optimizer = build_optimizer(groups, OptimConfig(), 1e-3)
        assert isinstance(optimizer, torch.optim.AdamW)
        assert all(group["fused"] for group in optimizer.param_groups)


def test_role_groups_without_a_role_or_with_a_policy_refused(config: BackboneConfig) -> None:
    with pytest.raises(ConfigError, match=r"1\.weight"):
        role_groups(nn.Sequential(nn.Linear(2, 2, bias=False), nn.LayerNorm(2)), frozenset())
    with pytest.raises(ConfigError, match="decayed_roles"):
        role_groups(Backbone(config), "iwd")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="role of weight"):
        role_groups(ScaledLinear(2, 2, role="gate"), frozenset())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_group_table_shows_kind_rate_and_decay(name: str, config: BackboneConfig) -> None:
    strategy = ScaleStrategy.parse("unified")
    model = Backbone(config, strategy)
    optimizer = build_optimizer(role_groups(model, strategy.decayed_roles), OptimConfig(name), 3e-3)
    rows = {row[0]: row[1:] for row in group_table(optimizer)}
    assert list(rows) == ["matrix", "head", "embedding", "input scale", "output scale"]
    for role, (_, _, kind, lr, decay) in rows.items():
        assert kind == ("adamw" if name == "muon" and role != "matrix" else name)
        assert (lr, decay) == ("0.003", "0" if role == "output scale" else "0.1")
    assert rows["matrix"][:2] == ["14", f"{2 * (4 * 32**2 + 3 * 32 * 85):,}"]
    assert sum(int(row[1].replace(",", "")) for row in rows.values()) == sum(
        p.numel() for p in model.parameters()
    )


ROLES = {"matrix", "head", "embedding", "input", "output"}
DECAYED = ROLES - {"output"}
#: (optimizer, setting, value, roles whose groups change, entries that change)
EFFECTS: list[tuple[str, str, Any, Collection[str], dict[str, Any]]] = [
    ("adamw", "beta1", 0.8, ROLES, {"betas": (0.8, 0.95)}),
    ("adamw", "beta2", 0.99, ROLES, {"betas": (0.9, 0.99)}),
    ("adamw", "eps", 1e-6, ROLES, {"eps": 1e-6}),
    ("adamw", "weight_decay", 0.2, DECAYED, {"weight_decay": 0.2}),
    ("adamw", "undecayed", ["head"], ["head"], {"weight_decay": 0.0}),
    ("adamw", "lr_factor_by_role", {"head": 0.5}, ["head"], {"lr": 5e-4}),
    ("adamw", "weight_decay_by_role", {"input": 0.3}, ["input"], {"weight_decay": 0.3}),
    ("muon", "beta1", 0.8, ROLES - {"matrix"}, {"betas": (0.8, 0.95), "momentum": 0.8}),
    ("muon", "beta2", 0.99, ROLES - {"matrix"}, {"betas": (0.9, 0.99)}),
    ("muon", "eps", 1e-6, ROLES - {"matrix"}, {"eps": 1e-6}),
    ("muon", "weight_decay", 0.2, DECAYED, {"weight_decay": 0.2}),
    ("muon", "muon_roles", ["matrix", "head"], ["head"], {"kind": "muon", "momentum": 0.95}),
    ("muon", "muon_momentum", 0.8, ["matrix"], {"momentum": 0.8}),
    ("muon", "ns_dtype", "float32", ["matrix"], {"ns_dtype": "float32"}),
    ("sgd", "beta1", 0.8, ROLES, {"momentum": 0.8}),
    ("sgd", "weight_decay", 0.2, DECAYED, {"weight_decay": 0.2}),
]
#: settings that other tests change, because the optimizer is not built from them
NOT_IN_GROUPS = {"name", "lr", "clip_by_role"}


def groups_of(config: BackboneConfig, optim: OptimConfig) -> dict[str, dict[str, Any]]:
    strategy = ScaleStrategy.parse("unified")
    groups = role_groups(Backbone(config, strategy), strategy.decayed_roles)
    optimizer = build_optimizer(groups, optim, 1e-3)
    return {group["role"]: group for group in optimizer.param_groups}


@pytest.mark.parametrize(("name", "key", "value", "roles", "entries"), EFFECTS)
def test_optim_setting_changes_its_entries_of_the_groups_alone(
    name: str,
    key: str,
    value: Any,
    roles: Collection[str],
    entries: dict[str, Any],
    config: BackboneConfig,
) -> None:
    before = groups_of(config, OptimConfig(name))
    after = groups_of(config, OptimConfig(name, **{key: value}))
    for role in ROLES:
        changed = {}
        for entry in (before[role].keys() & after[role].keys()) - {"params"}:
            if after[role][entry] != before[role][entry]:
                changed[entry] = after[role][entry]
        assert changed == (entries if role in roles else {}), role


def test_every_optim_setting_is_in_the_table_of_effects() -> None:
    settings = {each.name for each in fields(OptimConfig)}
    assert {key for _, key, *_ in EFFECTS} | NOT_IN_GROUPS == settings


def test_sgd_two_steps_equal_its_formula() -> None:
    model = nn.ModuleList([nn.Linear(3, 2, bias=False)]).double()
    (weight,) = model.parameters()
    expected = weight.detach().clone()
    momentum = torch.zeros(2, 3).double()
    settings = OptimConfig("sgd", beta1=0.8, weight_decay=0.2)
    optimizer = build_optimizer(role_groups(model, frozenset()), settings, 0.1)
    for _ in range(2):
        weight.grad = torch.randn(2, 3).double()
        optimizer.step()
        momentum = 0.8 * momentum + weight.grad + 0.2 * expected
        expected = expected - 0.1 * momentum
    torch.testing.assert_close(weight.detach(), expected)


@pytest.mark.parametrize(("model", "optimizer", "known_case"), [
    ("custom", "adamw", ""),
    ("llama-0.5b", "muon", "llama-0.5b adamw cos"),
])  # fmt: skip
def test_tuned_lr_of_an_unknown_combination_refused(
    model: str, optimizer: str, known_case: str
) -> None:
    with pytest.raises(ConfigError, match=f"^model.optim.lr is .*{known_case}"):
        tuned_lr(model, optimizer, "cos", ScaleStrategy.parse("unified"))


ratios = st.floats(0, 0.99)


@given(st.integers(1, 30_000), ratios, ratios, st.data())
def test_schedule_factor_equals_closed_form(
    total: int, warmup_ratio: float, final: float, data: st.DataObject
) -> None:
    warmup = round(warmup_ratio * total)
    step = data.draw(st.integers(0, total - 1))
    cos = ScheduleConfig("cos", warmup_ratio, final).factor(step, total)
    if step < warmup:
        assert cos == pytest.approx((step + 1) / (warmup + 1), abs=1e-12)
    else:
        share = (step - warmup) / max(1, total - 1 - warmup)
        assert cos == pytest.approx(
            final + (1 - final) * (1 + math.cos(math.pi * share)) / 2, abs=1e-12
        )

    stable_ratio = data.draw(st.floats(warmup_ratio, 1))
    stable = round(stable_ratio * total)
    wsd = ScheduleConfig("wsd", warmup_ratio, final, stable_ratio).factor(step, total)
    if step < stable:
        assert wsd == pytest.approx(min(1, (step + 1) / (warmup + 1)), abs=1e-12)
    else:
        share = (step - stable) / (total - stable)
        assert wsd == pytest.approx((1 - share) + share * final, abs=1e-12)
