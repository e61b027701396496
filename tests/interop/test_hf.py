"""Backbones as Hugging Face's models: the same logits, or a reason."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from lightning_sv import Backbone, BackboneConfig
from lightning_sv.errors import ConfigError
from lightning_sv.interop import to_hugging_face
from lightning_sv.nn import RouterConfig, router_loss
from lightning_sv.scale import ScaleOptions
from tests.conftest import GEMMA, LLAMA_31, MOE, perturbed, thinned
from tests.interop.wide import float64_throughout


def test_to_hugging_face_unknown_norms_or_width_refused(config: BackboneConfig) -> None:
    with pytest.raises(ConfigError, match="d_model"):
        to_hugging_face(Backbone(BackboneConfig(32, 1, 3, 64, d_head=10)))
    with pytest.raises(ConfigError, match="post_norm is True"):
        to_hugging_face(Backbone(replace(config, post_norm=True)))
    with pytest.raises(ValueError, match="n_expert_shared"):
        to_hugging_face(Backbone(replace(config, **MOE, qk_norm=True)))
    with pytest.raises(ValueError, match="router.balance is bias"):
        to_hugging_face(Backbone(replace(config, **MOE, router=RouterConfig(balance="bias"))))
    for sizes in (MOE, MOE | {"n_expert_shared": 0}):
        with pytest.raises(ConfigError, match="expert_gate_proj"):
            to_hugging_face(Backbone(replace(config, **sizes), "unified"))


UNGATED = MOE | {"router": RouterConfig(renormalize=False, gate_shared=True)}
UNSHARED = MOE | {"n_expert_shared": 0}


def assert_same_logits(model: Backbone, family: str, *, own_code: bool = False) -> None:
    """Theirs is of the family, or our code on top of it, and gives our logits in float64; no scale
    vector is 1."""
    model = perturbed(model).double()
    base = getattr(transformers, f"{family}ForCausalLM")
    with float64_throughout(base):
        theirs = to_hugging_face(model, eot=3)
    name = f"{'Scaled' if own_code else ''}{family}ForCausalLM"
    assert type(theirs).__name__ == name and isinstance(theirs, base)
    assert (theirs.config.bos_token_id, theirs.generation_config.eos_token_id) == (3, 3)
    theirs.config._experts_implementation = "eager"  # their grouped product knows no float64
    tokens = torch.randint(0, model.config.vocab_size, (3, 24))
    with torch.no_grad(), float64_throughout(base):
        found = theirs(tokens).logits
        torch.testing.assert_close(found, model(tokens), rtol=1e-9, atol=1e-12)


PLAIN = [
    ("Llama", LLAMA_31),
    ("Gemma3", GEMMA | {"norm_eps": 0.1}),
    ("Qwen3", {"qk_norm": True, "n_kv_head": 1, "d_head": 10, "d_ff": 40, "norm_eps": 1e-3}),
    ("Qwen2Moe", MOE),
    ("Qwen2Moe", UNGATED),
    ("Qwen2Moe", UNSHARED),
    ("Qwen3Moe", UNSHARED | {"qk_norm": True}),
]


@pytest.mark.parametrize(("family", "sizes"), thinned(PLAIN, [*PLAIN[:5], PLAIN[6]], several=True))
@pytest.mark.parametrize(
    "text", thinned(["llama", "offset", "nop", "hg+dp+or"], ["offset", "hg+dp+or"])
)
def test_to_hugging_face_same_logits(
    text: str, family: str, sizes: dict[str, Any], config: BackboneConfig
) -> None:
    assert_same_logits(Backbone(replace(config, **sizes), text), family)


def test_to_hugging_face_loss_of_the_router_is_ours(config: BackboneConfig) -> None:
    """Of one layer: theirs pools the tokens of all layers."""
    config = replace(config, **MOE, n_layer=1, router=RouterConfig(balance_coef=0.02))
    model = perturbed(Backbone(config))
    tokens = torch.randint(0, config.vocab_size, (3, 24))
    theirs = to_hugging_face(model)
    (_, routings) = model(tokens, with_routing=True)
    added = theirs.router_aux_loss_coef * theirs(tokens, output_router_logits=True).aux_loss
    torch.testing.assert_close(added, router_loss(routings, config))
    config = replace(config, router=RouterConfig(balance="none", balance_coef=0.02))
    assert to_hugging_face(Backbone(config)).config.router_aux_loss_coef == 0


def test_to_hugging_face_positions_of_bf16_weights_are_exact(config: BackboneConfig) -> None:
    model = perturbed(Backbone(config)).bfloat16()
    tokens = torch.randint(0, config.vocab_size, (1, 100))
    rotary = to_hugging_face(model).model.rotary_emb
    assert rotary.inv_freq.dtype == torch.float32
    expected = Backbone(config).double()
    expected.load_state_dict(model.state_dict())
    found = to_hugging_face(model).float()(tokens).logits
    torch.testing.assert_close(found, expected(tokens).float(), rtol=1e-4, atol=1e-4)


SHARE: dict[str, Any] = {"share_heads": ["q_proj", "k_proj"]}
DENSE = {"placement_at": dict.fromkeys(("v_proj", "gate_proj", "up_proj", "lm_head"), "dp")}
SPARSE = {
    "placement_at": dict.fromkeys(("v_proj", "expert_gate_proj", "expert_up_proj", "lm_head"), "dp")
}
GEMMAS = {"placement_at": {"q_proj": "dp", "k_proj": "dp"}}
#: family, sizes and options of `unified`, and whether our code is needed
UNIFIED = [
    # dnp on q and k with vectors that heads share is plain Qwen 3
    ("Qwen3", LLAMA_31, DENSE | SHARE, False),
    ("Qwen3Moe", UNSHARED, SPARSE | SHARE, False),
    ("Qwen3", {"n_head": 1}, DENSE, False),
    # other normalized outputs
    ("Llama", LLAMA_31, {}, True),
    ("Llama", {}, {"placement_at": {"gate_proj": "dp", "lm_head": "np", "v_proj": "anp"}}, True),
    ("Gemma3", GEMMA, GEMMAS, True),
    ("Qwen3", {"qk_norm": True}, GEMMAS, True),
]


@pytest.mark.parametrize(
    ("family", "sizes", "options", "own_code"),
    thinned(UNIFIED, [UNIFIED[i] for i in (0, 1, 3, 4, 5)], several=True),
)
def test_to_hugging_face_unified_same_logits(
    family: str,
    sizes: dict[str, Any],
    options: dict[str, Any],
    own_code: bool,
    config: BackboneConfig,
) -> None:
    model = Backbone(replace(config, **sizes), "unified", ScaleOptions(**options))
    assert_same_logits(model, family, own_code=own_code)
