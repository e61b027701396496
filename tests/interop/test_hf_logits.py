"""The same logits as Hugging Face's models, and which of them it is."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from lightning_sv import Backbone, BackboneConfig
from lightning_sv.interop import to_hugging_face
from lightning_sv.nn import RouterConfig
from lightning_sv.scale import ScaleOptions
from tests.conftest import GEMMA, LLAMA_31, MOE, perturbed, thinned
from tests.interop.wide import float64_throughout


def trained(config: BackboneConfig, text: str, **options: Any) -> Backbone:
    """A model after some real steps: every scale vector has left 1."""
    model = perturbed(Backbone(config, text, ScaleOptions(**options)), 0.1).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, config.vocab_size, (8, 17))
    for _ in range(3):
        optimizer.zero_grad()
        model(tokens[:, :-1], targets=tokens[:, 1:]).backward()
        optimizer.step()
    return model


def test_to_hugging_face_unknown_norms_refused(config: BackboneConfig) -> None:
    with pytest.raises(ValueError, match="post_norm"):
        to_hugging_face(Backbone(replace(config, post_norm=True)))
    with pytest.raises(ValueError, match="n_expert_shared"):
        to_hugging_face(Backbone(replace(config, **MOE, qk_norm=True)))
    with pytest.raises(ValueError, match="router.balance is bias"):
        to_hugging_face(Backbone(replace(config, **MOE, router=RouterConfig(balance="bias"))))


UNGATED, UNSHARED = MOE | {"router": RouterConfig(renormalize=False, gate_shared=True)}, MOE | {"n_expert_shared": 0}


def assert_same_logits(model: Backbone, family: str, *, own_code: bool = False) -> None:
    """Theirs is of the family, or our code on top of it, and gives our logits in float64."""
    base = getattr(transformers, f"{family}ForCausalLM")
    with float64_throughout(base):
        theirs = to_hugging_face(model, eot=3)
    assert type(theirs).__name__ == f"{'Scaled' if own_code else ''}{family}ForCausalLM" and isinstance(theirs, base)
    assert (theirs.config.bos_token_id, theirs.generation_config.eos_token_id) == (3, 3)
    theirs.config._experts_implementation = "eager"  # their grouped product knows no float64
    tokens = torch.randint(0, model.config.vocab_size, (3, 24))
    with torch.no_grad(), float64_throughout(base):
        found = theirs(tokens).logits
        torch.testing.assert_close(found, model(tokens), rtol=1e-9, atol=1e-12)


PLAIN = [
    ("Llama", {}),
    ("Llama", LLAMA_31),
    ("Gemma3", GEMMA),
    ("Qwen3", {"qk_norm": True}),
    ("Qwen2Moe", MOE),
    ("Qwen2Moe", UNGATED),
    ("Qwen2Moe", UNSHARED),
    ("Qwen3Moe", UNSHARED | {"qk_norm": True}),
]


@pytest.mark.parametrize(
    ("family", "sizes"),
    thinned(PLAIN, [PLAIN[i] for i in (1, 2, 3, 4, 5, 7)], several=True),
    ids=["llama", "llama-3.1", "gemma", "qwen3", "moe", "gated", "unshared", "qwen3-moe"],
)
@pytest.mark.parametrize("text", thinned(["llama", "offset", "nop", "hg+dp+or"], ["offset", "hg+dp+or"]))
def test_to_hugging_face_same_logits(text: str, family: str, sizes: dict[str, Any], config: BackboneConfig) -> None:
    assert_same_logits(trained(replace(config, **sizes), text), family)


SHARE: dict[str, Any] = {"share_heads": ["q_proj", "k_proj"]}
DENSE = {"placement_at": dict.fromkeys(("v_proj", "gate_proj", "up_proj", "lm_head"), "dp")}
SPARSE = {"placement_at": dict.fromkeys(("v_proj", "expert_gate_proj", "expert_up_proj", "lm_head"), "dp")}
GEMMAS = {"placement_at": {"q_proj": "dp", "k_proj": "dp"}}
#: family, sizes and options of `unified`, and whether our code is needed
UNIFIED = [
    # dnp on q and k with vectors that heads share is plain Qwen 3
    ("Qwen3", {}, DENSE | SHARE, False),
    ("Qwen3", LLAMA_31, DENSE | SHARE, False),
    ("Qwen3Moe", UNSHARED, SPARSE | SHARE, False),
    ("Qwen3", {"n_head": 1}, DENSE, False),
    # other normalized outputs
    ("Llama", {}, {}, True),
    ("Llama", LLAMA_31, {}, True),
    ("Llama", {}, SHARE, True),
    ("Llama", {}, DENSE, True),
    ("Llama", {}, {"placement_at": {"gate_proj": "dp", "lm_head": "np", "v_proj": "anp"}}, True),
    ("Gemma3", GEMMA, GEMMAS, True),
    ("Qwen3", {"qk_norm": True}, GEMMAS, True),
    ("Qwen2Moe", MOE, {}, True),
    ("Qwen2Moe", UNSHARED, {"placement_at": {"expert_gate_proj": "dp"}}, True),
    ("Qwen2Moe", MOE, SPARSE | SHARE, True),
    ("Qwen3Moe", UNSHARED | {"qk_norm": True}, GEMMAS, True),
]


@pytest.mark.parametrize(
    ("family", "sizes", "options", "own_code"),
    thinned(UNIFIED, [UNIFIED[i] for i in (1, 2, 5, 8, 9, 13)], several=True),
)
def test_to_hugging_face_unified_same_logits(
    family: str, sizes: dict[str, Any], options: dict[str, Any], own_code: bool, config: BackboneConfig
) -> None:
    assert_same_logits(trained(replace(config, **sizes), "unified", **options), family, own_code=own_code)
