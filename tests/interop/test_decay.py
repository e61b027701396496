"""Decay of an optimizer against a policy."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_sv import Backbone, BackboneConfig
from lightning_sv.errors import ConfigError
from lightning_sv.interop import apply_strategy, decay_report, param_groups, weight_decay_roles
from tests.roles.families import find


@pytest.fixture
def model() -> nn.Module:
    """Norms before matrices, and norms of queries and keys."""
    return find("qwen3_moe").build()


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    vectors = [p for p in model.parameters() if p.ndim < 2]
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)


def test_decay_report_names_what_differs(model: nn.Module) -> None:
    roles = weight_decay_roles(model)
    for optimizer, role, decays in (
        (two_groups(model), "input", False),
        (torch.optim.AdamW(model.parameters(), weight_decay=0.1), "output", True),
    ):
        report = decay_report(model, optimizer)
        vectors = {row.name for row in roles.parameters if row.role == role}
        expected = {(name, role, decays) for name in vectors}
        assert set(report.differences) == expected
        shown = [line.split() for line in str(report).splitlines()]
        count = f"{len(vectors)}"
        assert [role, count, *((count, "0") if decays else ("0", count))] in shown


@pytest.mark.parametrize("policy", ["iwd", "owd"])
def test_decay_report_hint_removes_the_differences(model: nn.Module, policy: str) -> None:
    before = decay_report(model, two_groups(model), policy=policy)
    assert before.differences and f"param_groups(..., policy='{policy}')" in str(before)
    groups = param_groups(model, 1e-3, 0.1, policy)
    after = decay_report(model, torch.optim.AdamW(groups), policy=policy)
    assert not after.differences and "param_groups" not in str(after)


def test_decay_report_several_optimizers_wrapped_model_and_missing_parameters(
    model: nn.Module,
) -> None:
    roles = weight_decay_roles(model)
    wrapped: Any = torch.compile(model)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1][1:]
    optimizers = [
        torch.optim.SGD(matrices, 0.1, weight_decay=0.1),
        torch.optim.AdamW(vectors, weight_decay=0.0),
    ]
    report = decay_report(wrapped, optimizers, roles=roles)
    assert {row.role for row in report.differences} == {"input"}
    assert len(report.now) == len(matrices) + len(vectors)
    assert set(report.now) | set(report.without_optimizer) == {
        name for name, _ in wrapped.named_parameters()
    }
    assert "Not in an optimizer" in str(report) and "decays what" not in str(report)


@pytest.mark.parametrize("optimizer", [
    [], "AdamW", torch.optim.AdamW(nn.Linear(2, 2).parameters()), [torch.optim.AdamW],
], ids=["none", "text", "of another model", "class"])  # fmt: skip
def test_decay_report_wrong_optimizer_refused(optimizer: Any, model: nn.Module) -> None:
    with pytest.raises(ConfigError, match="optimizer"):
        decay_report(model, optimizer)


def test_decay_report_empty_policy_refused(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match="policy"):
        decay_report(model, torch.optim.AdamW(model.parameters()), policy="")


def test_page_example_for_muon_chooses_by_role() -> None:
    """The vectors of stacked experts have two axes, like matrices."""
    page = (
        (Path(__file__).parents[2] / "docs/own-model.md")
        .read_text()
        .partition("### Rules by number of axes")[2]
    )
    model = find("qwen3_moe").build()
    with pytest.warns(UserWarning, match="gate_up_proj"):
        report = apply_strategy(model, "hg+dp+or+iwd")
    names: dict[str, Any] = {"torch": torch, "model": model, "tokens": None}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    optimizers = [names["muon"], names["adamw"]]
    assert report.stacked and not decay_report(model, optimizers).differences
    vectors: set[int] = set()
    for name in report.vectors:
        vectors.update(map(id, model.get_submodule(name).parameters()))
    assert not vectors & {id(p) for p in names["muon"].param_groups[0]["params"]}


@pytest.mark.parametrize(
    "build", [lambda: find("llama").build(), lambda: Backbone(BackboneConfig(16, 1, 2, 48))]
)
def test_param_groups_of_compiled_model_needs_no_example(build: Any) -> None:
    model = build()
    expected = param_groups(model, 1e-3, 0.1)
    found = param_groups(torch.compile(model), 1e-3, 0.1)
    assert [[id(p) for p in group["params"]] for group in found] == [
        [id(p) for p in g["params"]] for g in expected
    ]


@pytest.mark.filterwarnings("ignore:apply_strategy has:UserWarning")  # stacked experts
@pytest.mark.parametrize("strategy", ["hg+dp+or", "hg+dp+or+iwd", "hg+dp+nowd"])
def test_decay_report_without_policy_agrees_with_groups_without_policy(
    model: nn.Module, strategy: str
) -> None:
    apply_strategy(model, strategy)
    optimizer = torch.optim.AdamW(param_groups(model, 1e-3, weight_decay=0.1))
    assert not decay_report(model, optimizer).differences
