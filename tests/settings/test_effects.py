"""Every field of a config has an effect on what is built from it."""

import multiprocessing
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sv import BackboneConfig, PretrainModule, TokenDataModule
from lightning_sv.corpus import CorpusConfig, TokenLoader
from lightning_sv.nn import Backbone, MixtureOfExperts, RouterConfig, router_loss
from lightning_sv.nn.config import RopeScalingConfig
from lightning_sv.optim import OptimConfig, role_groups
from lightning_sv.scale import ScaleOptions
from lightning_sv.settings.data import DataConfig
from lightning_sv.settings.model import PretrainConfig
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
    ("share_scale_out", True, "shapes", "hg+dp+iwd"),
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


TOKENS = torch.arange(34).view(2, 17) % 32


def rate(module: PretrainModule) -> float:
    """Return the largest change of an entry in the first step of AdamW, which is the learning
    rate."""
    before = module.net.embed.weight.detach().clone()
    trainer = L.Trainer(max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(module, DataLoader(TOKENS, batch_size=2))
    return float((module.net.embed.weight.detach() - before).abs().max())


def has_weights_of_seed_7(module: PretrainModule) -> bool:
    expected = Backbone(module.settings.backbone, seed=7)
    return torch.equal(module.net.embed.weight, expected.embed.weight)


def steps(module: PretrainModule) -> int:
    """Return the steps of the budget, with a step of one token per parameter."""
    plan = module.settings.plan
    return plan.steps_for_budget(plan.n_activated)


def passes(module: PretrainModule) -> int:
    """Return how often a step computes a block."""
    calls: list[nn.Module] = []
    module.net.layers[0].register_forward_pre_hook(lambda block, inputs: calls.append(block))
    module.loss(TOKENS)[0].backward()
    return len(calls)


def residual_dtype(module: PretrainModule) -> torch.dtype:
    """Return the dtype of the residual stream in mixed precision."""
    dtypes: list[torch.dtype] = []
    module.net.layers[1].register_forward_pre_hook(
        lambda block, inputs: dtypes.append(inputs[0].dtype)
    )
    with torch.autocast("cpu", torch.bfloat16):
        module.loss(TOKENS)
    return dtypes[0]


#: (field, value, what is read of the built module, what it is by default, what it is with the
#: value)
MODULE: list[tuple[str, Any, Callable[[PretrainModule], Any], Any, Any]] = [
    ("scale", "hg+dp", lambda module: module.net.strategy.per_branch, False, True),
    (
        "scale_options",
        ScaleOptions(placement_at={"lm_head": "dp"}),
        lambda module: module.net.head.lm_head.scale_out is not None,
        False,
        True,
    ),
    ("optim", OptimConfig(lr=0.5), lambda module: round(rate(module), 2), 0.1, 0.5),
    ("tokens_per_param", 50.0, steps, 100, 50),
    ("activation_checkpointing", True, passes, 1, 2),
    ("residual", "narrow", residual_dtype, torch.float32, torch.bfloat16),
    ("attention_backend", "math", lambda module: module.net.layers[0].attn.backend, "auto", "math"),
    ("compile", "model", lambda module: module.net._compiled_call_impl is None, True, False),
    ("seed", 7, has_weights_of_seed_7, False, True),
]
#: fields that other tests change: their effect needs a Trainer or a file
MODULE_ELSEWHERE = {"backbone", "schedule", "mask_documents", "init_from"}


# a fit without validation, workers or a logger
@pytest.mark.filterwarnings("ignore::UserWarning:lightning")
@pytest.mark.parametrize(("key", "value", "read", "default", "expected"), MODULE)
def test_module_setting_is_found_in_the_module(
    key: str,
    value: Any,
    read: Callable[[PretrainModule], Any],
    default: Any,
    expected: Any,
    config: BackboneConfig,
) -> None:
    arguments = {"optim": OptimConfig(lr=0.1), "seed": 0}
    for changes, wanted in (({}, default), ({key: value}, expected)):
        module = PretrainModule(config, **(arguments | changes))
        module.configure_model()
        assert read(module) == wanted


def data_module(data: DataConfig) -> TokenDataModule:
    """Return the data module of a config on one device."""
    module = TokenDataModule.from_settings(data, {})
    module.setup("fit")
    return module


def train_loader(data: DataConfig) -> TokenLoader:
    """Return the training loader on one device."""
    return data_module(data).train_dataloader()


def first_batch(data: DataConfig) -> Tensor:
    """Return the first micro-batch of training."""
    return next(iter(train_loader(data)))


def workers(data: DataConfig) -> int:
    """Return the number of processes that read."""
    before = len(multiprocessing.active_children())
    batches = iter(train_loader(data))
    next(batches)
    return len(multiprocessing.active_children()) - before


#: (field, value, what is read of the config or its loader, what it is with the value)
DATA: list[tuple[str, Any, Callable[[DataConfig], Any], Any]] = [
    ("seq_len", 16, lambda data: first_batch(data).shape[1], 17),
    ("global_batch", 8, lambda data: len(train_loader(data).order.sequences(0, 0)), 8),
    ("micro_batch", 2, lambda data: first_batch(data).shape[0], 2),
    ("num_workers", 1, workers, 1),
    ("val_sequences", 5, lambda data: len(torch.cat(list(data_module(data).val_dataloader()))), 5),
    (
        "full_last_validation",
        False,
        lambda data: data.last_validation_sequences == data.validation_sequences,
        True,
    ),
]
#: fields that other tests change: the folder that every row reads, the schedule of validations, the
#: order of a fit
DATA_ELSEWHERE = {"corpus", "validations", "seed"}


@pytest.mark.parametrize(("key", "value", "read", "expected"), DATA)
def test_data_setting_is_found_in_what_is_read(
    key: str, value: Any, read: Callable[[DataConfig], Any], expected: Any, corpus: Path
) -> None:
    default = DataConfig(CorpusConfig(dir=str(corpus)), seq_len=8, global_batch=4, val_sequences=4)
    assert read(default) != expected
    assert read(replace(default, **{key: value})) == expected


@pytest.mark.parametrize(
    ("kind", "rows", "elsewhere"),
    [
        # the name selects the tuned learning rate, which tests/optim reads
        (BackboneConfig, BACKBONE, {"name"}),
        (RouterConfig, ROUTER, set()),
        (ScaleOptions, OPTIONS, set()),
        (PretrainConfig, MODULE, MODULE_ELSEWHERE),
        (DataConfig, DATA, DATA_ELSEWHERE),
    ],
)
def test_every_field_has_a_row(
    kind: type[Any], rows: list[tuple[Any, ...]], elsewhere: set[str]
) -> None:
    assert {row[0] for row in rows} | elsewhere == {each.name for each in fields(kind)}
