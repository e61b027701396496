"""Every field of a config has an effect on what is built from it."""

import multiprocessing
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_sv import BackboneConfig, PretrainModule, TokenDataModule
from lightning_sv.nn import Backbone, MixtureOfExperts, RouterConfig, router_loss
from lightning_sv.nn.config import RopeScalingConfig
from lightning_sv.optim import role_groups
from lightning_sv.scale import ScaleOptions
from tests.conftest import MOE

EXPERTS = MOE | {"router": RouterConfig()}
BIASED = MOE | {"router": RouterConfig(balance="bias")}
Effects = list[tuple[str, Any, str, Any]]

#: (field, value, what changes, other fields of the backbone)
BACKBONE: Effects = [
    ("d_model", 64, "shapes", {}),
    ("n_layer", 3, "shapes", {}),
    ("n_head", 4, "loss", {}),
    ("vocab_size", 64, "shapes", {}),
    ("d_head", 8, "shapes", {}),
    ("n_kv_head", 1, "shapes", {}),
    ("d_ff", 40, "shapes", {}),
    ("qk_norm", True, "shapes", {}),
    ("post_norm", True, "shapes", {}),
    ("n_expert", 6, "shapes", {}),
    ("n_expert_active", 3, "loss", MOE),
    ("n_expert_shared", 0, "shapes", MOE),
    ("d_expert", 10, "shapes", MOE),
    ("router", RouterConfig(z_coef=1.0), "loss", MOE),
    ("rope_theta", 10.0, "loss", {}),
    ("rope_scaling", RopeScalingConfig(8.0, 1.0, 4.0, 64), "loss", {}),
    ("norm_eps", 0.1, "loss", {}),
    ("init_std", 0.1, "weights", {}),
    ("init_std_by_role", {"head": 0.1}, "weights", {}),
    ("init_residual_scaling", False, "weights", {}),
]
#: (field, value, what changes, fields of the backbone)
ROUTER: Effects = [
    ("renormalize", False, "loss", EXPERTS),
    ("balance", "none", "loss", EXPERTS),
    ("balance", "bias", "shapes", EXPERTS),
    ("balance_coef", 1.0, "loss", EXPERTS),
    ("bias_rate", 0.1, "moved bias", BIASED),
    ("z_coef", 1.0, "loss", EXPERTS),
    ("gate_shared", True, "shapes", EXPERTS),
]
#: (field, value, what changes, strategy)
OPTIONS: Effects = [
    ("placement_at", {"lm_head": "bp"}, "shapes", "hg+dp+iwd"),
    ("role_at", {"v_proj.scale_out": "input"}, "roles", "hg+dp+iwd"),
    ("freeze_input_beta", True, "roles", "hg+dnp+or"),
    ("share_heads", ["q_proj", "k_proj"], "shapes", "hg+dp+iwd"),
    ("initial_gamma_out", 2.0, "weights", "hg+dp+iwd"),
]


def facts(
    config: BackboneConfig, scale: str = "llama", options: ScaleOptions | None = None
) -> dict[str, Any]:
    """Build a model; return what can differ, with the loss at weights that do not depend on
    initialization."""
    model = Backbone(config, scale, options)
    state = model.state_dict()
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    weights = {name: value.tolist() for name, value in state.items()}
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)

    tokens = torch.arange(33).view(1, -1)
    with torch.no_grad():
        nats, routings = model(tokens[:, :-1], targets=tokens[:, 1:], with_routing=True)
    experts = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    for module, routing in zip(experts, routings, strict=True):
        module.move_bias(routing.load)
    return {
        "shapes": shapes,
        "weights": weights,
        "roles": roles_of(model),
        "loss": float(nats + router_loss(routings, config)),
        "moved bias": [value.tolist() for value in model.buffers()],
    }


def roles_of(model: Backbone) -> dict[str, str]:
    """Return the optimizer's role of each trained parameter."""
    roles: dict[str, str] = {}
    for group in role_groups(model, model.strategy.decayed_roles):
        for member in group.members:
            if member.parameter.requires_grad:
                roles[member.name] = group.role
    return roles


def check_effect(before: dict[str, Any], after: dict[str, Any], effect: str) -> None:
    """Check that nothing but `effect` differs; all else may follow from different shapes."""
    changed = [key for key in before if before[key] != after[key]]
    assert changed == [effect] or (effect == "shapes" and effect in changed)


@pytest.mark.parametrize(("key", "value", "effect", "others"), BACKBONE)
def test_backbone_setting_changes_the_model(
    key: str, value: Any, effect: str, others: dict[str, Any], config: BackboneConfig
) -> None:
    before = replace(config, **others)
    check_effect(facts(before), facts(replace(before, **{key: value})), effect)


@pytest.mark.parametrize(("key", "value", "effect", "others"), ROUTER)
def test_router_setting_changes_the_model(
    key: str, value: Any, effect: str, others: dict[str, Any], config: BackboneConfig
) -> None:
    before = replace(config, **others)
    router = replace(before.router, **{key: value})
    check_effect(facts(before), facts(replace(before, router=router)), effect)


@pytest.mark.parametrize(("key", "value", "effect", "scale"), OPTIONS)
def test_scale_option_changes_the_model(
    key: str, value: Any, effect: str, scale: str, config: BackboneConfig
) -> None:
    options = ScaleOptions(**{key: value})
    check_effect(facts(config, scale), facts(config, scale, options), effect)


def has_weights_of_seed_7(net: Backbone) -> bool:
    return torch.equal(net.embed.weight, Backbone(net.config, seed=7).embed.weight)


#: (field, value, what is read of the built backbone, what it is by default, with the value)
MODULE: list[tuple[str, Any, Callable[[Backbone], Any], Any, Any]] = [
    ("activation_checkpointing", True, lambda net: net.activation_checkpointing, False, True),
    ("residual", "narrow", lambda net: net.narrow_residual, False, True),
    ("attention_backend", "math", lambda net: net.layers[0].attn.backend, "auto", "math"),
    ("compile", "model", lambda net: net._compiled_call_impl is None, True, False),
    ("seed", 7, has_weights_of_seed_7, False, True),
]


@pytest.mark.parametrize(("key", "value", "read", "default", "expected"), MODULE)
def test_module_setting_is_found_in_the_backbone(
    key: str,
    value: Any,
    read: Callable[[Backbone], Any],
    default: Any,
    expected: Any,
    config: BackboneConfig,
) -> None:
    arguments = {"lr": 0.1, "seed": 0}
    for changes, wanted in (({}, default), ({key: value}, expected)):
        module = PretrainModule(config, **(arguments | changes))
        module.configure_model()
        assert read(module.net) == wanted


@pytest.mark.parametrize("num_workers", [0, 1])
def test_num_workers_are_the_processes_that_read(num_workers: int, corpus: Path) -> None:
    data = TokenDataModule(corpus, seq_len=8, batch_size=4, num_workers=num_workers)
    before = len(multiprocessing.active_children())
    batches = iter(data.train_dataloader())
    next(batches)
    assert len(multiprocessing.active_children()) - before == num_workers


@pytest.mark.parametrize(
    ("kind", "rows", "elsewhere"),
    [
        # the name selects the tuned learning rate, which tests/optim reads
        (BackboneConfig, BACKBONE, {"name"}),
        (RouterConfig, ROUTER, set()),
        (ScaleOptions, OPTIONS, {"share_scale_out"}),  # False
    ],
)
def test_every_field_has_a_row(
    kind: type[Any], rows: list[tuple[Any, ...]], elsewhere: set[str]
) -> None:
    assert {row[0] for row in rows} | elsewhere == {each.name for each in fields(kind)}
