"""Gemma's norms: where they are, which role their vectors have, what is refused. Logits: tests/interop."""

from dataclasses import replace

import pytest
import torch

from lightning_sv import Backbone, BackboneConfig, ScaleStrategy
from lightning_sv.nn import meta_backbone
from lightning_sv.optim import role_groups
from lightning_sv.scale import ScaleOptions
from tests.conftest import GEMMA

OUTPUT_SITES = ("q_norm", "k_norm", "attn_post_norm", "ffn_post_norm")


def test_pre_norms_are_input_and_the_others_output_norms(config: BackboneConfig) -> None:
    model = meta_backbone(replace(config, **GEMMA))
    groups = {group.role: group for group in role_groups(model, ScaleStrategy.parse("iwd").decayed_roles)}
    inputs = {m.name for m in groups["input"].members}
    outputs = {m.name for m in groups["output"].members}
    assert len(inputs) == 2 * config.n_layer + 1 and all(".norm.scale.gamma" in name for name in inputs)
    assert {name.split(".")[-3] for name in outputs} == set(OUTPUT_SITES) and len(outputs) == 4 * config.n_layer
    assert groups["input"].decays and not groups["output"].decays
    sizes = {m.name.split(".")[-3]: m.parameter.numel() for m in groups["output"].members}
    assert sizes == {"q_norm": 16, "k_norm": 16, "attn_post_norm": 32, "ffn_post_norm": 32}  # head width, d_model


def test_size_of_gemma_05b() -> None:
    llama = BackboneConfig(d_model=1280, n_layer=18, n_head=20)
    n = [sum(p.numel() for p in meta_backbone(c).parameters()) for c in (llama, replace(llama, **GEMMA))]
    assert n[1] - n[0] == 18 * (2 * 64 + 2 * 1280)


def test_norms_do_what_their_names_say(config: BackboneConfig) -> None:
    model = Backbone(replace(config, **GEMMA, norm_eps=1e-9, init_std=0.3))
    attn, seen = model.layers[0].attn, {}
    for name in ("q_norm", "k_norm"):
        getattr(attn, name).register_forward_hook(lambda m, i, out, name=name: seen.update({name: out}))
    for name in ("attn_post_norm", "ffn_post_norm"):
        getattr(model.layers[0], name).register_forward_hook(lambda m, i, out, name=name: seen.update({name: out}))
    model(torch.randint(0, config.vocab_size, (2, 8)))
    assert seen["q_norm"].shape == (2, 8, config.n_head, config.head_width)
    for name, out in seen.items():
        rms = out.square().mean(-1).sqrt()
        torch.testing.assert_close(rms, torch.ones_like(rms), rtol=1e-3, atol=0, msg=name)


@pytest.mark.parametrize("text", ["dnp", "unified", "hg+dnp"])
def test_qk_norm_with_dnp_is_refused(text: str, config: BackboneConfig) -> None:
    with pytest.raises(ValueError, match="model.backbone.qk_norm"):
        meta_backbone(replace(config, qk_norm=True), text)
    options = ScaleOptions(placement_at={"q_proj": "dp", "k_proj": "dp"})
    meta_backbone(replace(config, **GEMMA), text, options)  # what the message advises


def test_nop_has_no_scale_vector_at_all(config: BackboneConfig) -> None:
    model = meta_backbone(replace(config, **GEMMA), "nop")
    assert {group.role for group in role_groups(model, frozenset())} == {"matrix", "head", "embedding"}


def test_roles_of_single_norms_are_options(config: BackboneConfig) -> None:
    model = meta_backbone(replace(config, **GEMMA), "iwd", ScaleOptions(role_at={"q_norm.scale": "input"}))
    assert model.layers[0].attn.q_norm.scale.role == "input" and model.layers[0].attn.k_norm.scale.role == "output"
    with pytest.raises(ValueError, match="role_at names 'q_norm.scale'"):
        meta_backbone(config, "iwd", ScaleOptions(role_at={"q_norm.scale": "input"}))
