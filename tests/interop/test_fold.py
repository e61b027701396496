"""No extra expressivity: what scale vectors add is in the matrices, or is listed with its
reason."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_sv import Backbone, BackboneConfig
from lightning_sv.interop import fold, foldable
from lightning_sv.nn import RouterConfig
from lightning_sv.scale import ScaleOptions, ScaleStrategy
from lightning_sv.scale.vector import HeadShared
from tests.conftest import EVERY_BUILD, GEMMA, MOE, perturbed

BIASED = MOE | {"router": RouterConfig(balance="bias")}
FAMILIES: dict[str, dict[str, Any]] = {"dense": {}, "gemma": GEMMA, "moe": BIASED}
#: vectors of each family that stay if every possible output is normalized, by the last words of
#: their paths
STAY = {
    "dense": {"q_proj.scale_out", "k_proj.scale_out", "gate_proj.scale_out", "lm_head.scale_out"},
    "gemma": {"q_norm.scale", "k_norm.scale", "attn_post_norm.scale", "ffn_post_norm.scale"},
    "moe": {
        "q_proj.scale_out",
        "k_proj.scale_out",
        "expert_gate_proj.scale_out",
        "shared_gate_proj.scale_out",
    },
}
STAY["gemma"] |= {"gate_proj.scale_out", "lm_head.scale_out"}
STAY["moe"] |= {"lm_head.scale_out"}


def make(config: BackboneConfig, family: str, text: str, **options: Any) -> Backbone:
    """Return a float64 model whose scale vectors differ from 1, each by a different amount; some
    are negative."""
    if family == "gemma" and ScaleStrategy.parse(text).placement_row.norm_out:
        options["placement_at"] = {
            "q_proj": "dp",
            "k_proj": "dp",
        }  # which Q/K-norm normalizes already
    model = perturbed(
        Backbone(replace(config, **FAMILIES[family]), text, ScaleOptions(**options)).double(), 0.5
    )
    for router_bias in model.buffers():
        router_bias.copy_(torch.rand_like(router_bias))
    if "er" not in text.split("+"):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("gamma", "alpha")):
                    parameter[..., ::3] *= -1
    return model


def assert_folded(model: Backbone) -> Backbone:
    before = copy.deepcopy(model.state_dict())
    folded = fold(model)
    tokens = torch.randint(0, model.config.vocab_size, (2, 11))
    with torch.no_grad():
        expected = model(tokens)
        found = folded(tokens)
    assert float((found - expected).norm()) <= 1e-12 * float(expected.norm())
    assert type(folded) is Backbone
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    left = set()
    for path, module in folded.named_modules():
        if path.endswith((".scale", ".scale_out")) and list(module.parameters()):
            left.add(path)
    assert left == {row.vector for row in foldable(model) if row.into is None}
    remaining = foldable(folded)
    assert all(row.why for row in remaining)
    assert bool(left) == bool(remaining)
    return folded


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", EVERY_BUILD)
def test_fold_any_strategy_same_logits(text: str, family: str, config: BackboneConfig) -> None:
    model = make(config, family, text)
    folded = assert_folded(model)
    row = model.strategy.placement_row
    kept = {".".join(path.split(".")[-2:]) for path, into, _ in foldable(model) if into is None}
    if row.norm_out:
        assert kept == STAY[family]
    elif family == "gemma" and (row.scale_in or row.scale_out):
        assert kept == {word for word in STAY["gemma"] if word.endswith("norm.scale")}
    else:
        assert not kept and str(folded.strategy) == "nop"


def test_foldable_dnp_v_and_up_fold_into_next_matrix(config: BackboneConfig) -> None:
    moe = {
        "v_proj": "attn.o_proj",
        "expert_up_proj": "ffn.expert_down_proj",
        "shared_up_proj": "ffn.shared_down_proj",
    }
    for family, pairs in {
        "dense": {"v_proj": "attn.o_proj", "up_proj": "ffn.down_proj"},
        "moe": moe,
    }.items():
        rows = {row.vector: row.into for row in foldable(make(config, family, "unified"))}
        for name, reader in pairs.items():
            (vector,) = (
                path
                for path in rows
                if path.startswith("layers.1.") and path.endswith(f"{name}.scale_out")
            )
            assert rows[vector] == f"layers.1.{reader}"


@pytest.mark.parametrize(
    "options",
    [
        {"share_heads": ["q_proj", "k_proj"]},
        {"share_heads": ["q_proj", "k_proj", "v_proj"]},
        {"placement_at": {"v_proj": "dp", "gate_proj": "dp", "up_proj": "dp", "lm_head": "dp"}},
        {"placement_at": {"o_proj": "dp", "down_proj": "dp"}},
        {
            "placement_at": {"up_proj": "nop", "lm_head": "np", "v_proj": "anp"},
            "freeze_input_beta": True,
        },
    ],
    ids=str,
)
def test_fold_options_same_logits(options: dict[str, Any], config: BackboneConfig) -> None:
    folded = assert_folded(make(config, "dense", "unified", **options))
    shared = isinstance(folded.layers[0].attn.qkv.q_proj.scale_out, HeadShared)
    assert shared == ("share_heads" in options)
