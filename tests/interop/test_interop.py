"""No extra expressivity, and the same logits as Hugging Face's models."""

from dataclasses import replace

import pytest
import torch
import transformers
from transformers import LlamaForCausalLM

from lightning_sv import Backbone, BackboneConfig
from lightning_sv.interop import fold, to_hugging_face
from lightning_sv.nn import RouterConfig
from lightning_sv.scale import ScaleOptions, ScaleStrategy
from tests.close import assert_near
from tests.conftest import BUILDS, GEMMA, MOE, perturbed
from tests.interop.wide import float64_throughout

FOLDABLE = [text for text in BUILDS if not ScaleStrategy.parse(text).sides.norm_out]


def trained(config: BackboneConfig, text: str) -> Backbone:
    """A model after some real steps: every scale vector has left 1."""
    model = perturbed(Backbone(config, text), 0.1).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, config.vocab_size, (8, 17))
    for _ in range(10):
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    return model


@pytest.mark.filterwarnings("ignore:scale strategy")
@pytest.mark.parametrize("family", [{}, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("text", FOLDABLE)
def test_folding_a_trained_model_leaves_the_logits(text: str, family: dict, config: BackboneConfig) -> None:
    model = trained(replace(config, **family), text)
    folded = fold(model)
    assert not any(name.endswith(("gamma", "alpha", "beta", "offset")) for name, _ in folded.named_parameters())
    tokens = torch.randint(0, config.vocab_size, (2, 16))
    torch.testing.assert_close(folded(tokens), model(tokens), rtol=1e-9, atol=1e-9)


def test_what_cannot_be_folded_is_refused(config: BackboneConfig) -> None:
    with pytest.raises(ValueError, match="normalizes its output .* fold models without 'dnp'"):
        fold(Backbone(config, "unified"))
    with pytest.raises(ValueError, match=r"layers.0.attn.q_norm cannot be folded .* without qk_norm and post_norm"):
        fold(Backbone(replace(config, **GEMMA)))
    with pytest.raises(ValueError, match="normalizes its output"):
        to_hugging_face(Backbone(config, "llama", ScaleOptions(placement_at={"lm_head": "dnp"})))
    with pytest.raises(ValueError, match="transformers has no model with these norms"):
        to_hugging_face(Backbone(replace(config, qk_norm=True)))
    with pytest.raises(ValueError, match="no bias on the choice of experts"):
        to_hugging_face(Backbone(replace(config, **MOE, router=RouterConfig(balance="bias"))))


def test_exceptions_of_single_sites_are_folded_too(config: BackboneConfig) -> None:
    tokens = torch.randint(0, config.vocab_size, (3, 24))
    model = perturbed(Backbone(config, "llama", ScaleOptions(placement_at={"lm_head": "dp"})).double())
    with torch.no_grad(), float64_throughout(LlamaForCausalLM):
        expected = to_hugging_face(model)(tokens).logits
    torch.testing.assert_close(model(tokens), expected, rtol=1e-9, atol=1e-12)


UNGATED, UNSHARED = MOE | {"router": RouterConfig(renormalize=False, gate_shared=True)}, MOE | {"n_expert_shared": 0}


@pytest.mark.parametrize("d_expert", [21, 24])  # aligned to 16 bytes or not: theirs must run as exported
def test_exported_experts_of_any_width_run(d_expert: int, config: BackboneConfig) -> None:
    model = Backbone(replace(config, **MOE, d_expert=d_expert))
    tokens = torch.randint(0, config.vocab_size, (2, 16))
    with torch.no_grad():
        ours, theirs = model(tokens), to_hugging_face(model).eval()(tokens).logits
        exact = model.double()(tokens)
    for logits in (ours, theirs):  # the widths of all sums of two blocks and the head
        assert_near(logits, exact, terms=700)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("LlamaForCausalLM", {}),
        ("Gemma3ForCausalLM", GEMMA),
        ("Qwen2MoeForCausalLM", MOE),
        ("Qwen2MoeForCausalLM", UNGATED),
        ("Qwen2MoeForCausalLM", UNSHARED),
    ],
)
@pytest.mark.parametrize("text", ["llama", "offset", "nop", "hg+dp+or"])
def test_logits_equal_hugging_faces(text: str, name: str, family: dict, config: BackboneConfig) -> None:
    model = trained(replace(config, **family), text)
    family_of = getattr(transformers, name)
    with float64_throughout(family_of):
        theirs = to_hugging_face(model, eot=3).eval()
    assert (theirs.config.bos_token_id, theirs.generation_config.eos_token_id) == (None, 3)
    theirs.config._experts_implementation = "eager"  # their grouped product knows no float64
    assert type(theirs).__name__ == name
    tokens = torch.randint(0, config.vocab_size, (3, 24))
    with torch.no_grad(), float64_throughout(family_of):
        expected = theirs(tokens).logits
    torch.testing.assert_close(model(tokens), expected, rtol=1e-9, atol=1e-12)
