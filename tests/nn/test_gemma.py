"""Gemma's norms: where they are, which role their vectors have, what is refused. Logits: tests/interop."""

from dataclasses import replace

import pytest

from lightning_sv import BackboneConfig, ScaleStrategy
from lightning_sv.nn import meta_backbone
from lightning_sv.optim import role_groups
from lightning_sv.scale import ScaleOptions
from tests.conftest import GEMMA

OUTPUT_SITES = ("q_norm", "k_norm", "attn_post_norm", "ffn_post_norm")


def test_gemma_pre_norms_have_input_role_and_others_output_role(config: BackboneConfig) -> None:
    model = meta_backbone(replace(config, **GEMMA))
    groups = {group.role: group for group in role_groups(model, ScaleStrategy.parse("iwd").decayed_roles)}
    inputs = {m.name for m in groups["input"].members}
    outputs = {m.name for m in groups["output"].members}
    assert len(inputs) == 2 * config.n_layer + 1 and all(".norm.scale.gamma" in name for name in inputs)
    assert {name.split(".")[-3] for name in outputs} == set(OUTPUT_SITES) and len(outputs) == 4 * config.n_layer
    assert groups["input"].decays and not groups["output"].decays
    sizes = {m.name.split(".")[-3]: m.parameter.numel() for m in groups["output"].members}
    assert sizes == {"q_norm": 16, "k_norm": 16, "attn_post_norm": 32, "ffn_post_norm": 32}  # head width, d_model


def test_gemma_parameter_count_is_that_of_the_paper() -> None:
    llama = BackboneConfig(d_model=1280, n_layer=18, n_head=20)
    n = [sum(p.numel() for p in meta_backbone(c).parameters()) for c in (llama, replace(llama, **GEMMA))]
    assert n[1] - n[0] == 18 * (2 * 64 + 2 * 1280)


@pytest.mark.parametrize("text", ["dnp", "unified", "hg+dnp"])
def test_qk_norm_with_dnp_is_refused(text: str, config: BackboneConfig) -> None:
    with pytest.raises(ValueError, match="model.backbone.qk_norm"):
        meta_backbone(replace(config, qk_norm=True), text)
    options = ScaleOptions(placement_at={"q_proj": "dp", "k_proj": "dp"})
    meta_backbone(replace(config, **GEMMA), text, options)  # what the message advises
