"""The logged norms against a direct computation."""

from dataclasses import replace

import pytest
import torch

from lightning_sv import Backbone, BackboneConfig
from lightning_sv.callbacks import branch_norms
from lightning_sv.callbacks.tensorboard_layout import chart_layout
from tests.conftest import GEMMA, MOE, perturbed


@pytest.mark.parametrize("text", ["llama", "hg+dp+or", "unified", "nop"])
def test_branch_norms_equal_norms_of_dense_matrices(text: str, config: BackboneConfig) -> None:
    model = perturbed(Backbone(config, text)).double()
    norms = branch_norms(model)
    for name in ("q_proj", "k_proj", "v_proj"):
        per_layer = []
        for i, layer in enumerate(model.layers):
            gamma_in, gamma_out = layer.attn.qkv.gammas(name)
            w = getattr(layer.attn.qkv, name).weight.detach()
            effective = w.clone()
            if gamma_in is not None:
                effective = effective @ torch.diag(gamma_in.detach())
                assert norms[f"layer{i}/{name}/gamma_in"] == pytest.approx(
                    gamma_in.norm().item() / len(gamma_in) ** 0.5
                )
            if gamma_out is not None:
                effective = torch.diag(gamma_out.detach()) @ effective
            torch.testing.assert_close(norms[f"layer{i}/{name}/W"], w.norm())
            torch.testing.assert_close(norms[f"layer{i}/{name}/effective"], effective.norm())
            per_layer.append(effective.norm())
        torch.testing.assert_close(norms[f"mean/{name}/effective"], torch.stack(per_layer).mean())
    assert ("layer0/q_proj/gamma_in" in norms) == (text != "nop")
    assert "head/lm_head/effective" in norms
    tags = [tag for page in chart_layout(norms).values() for _, tags in page.values() for tag in tags]
    assert {tag.removeprefix("branch_norm/") for tag in tags} <= set(norms)


def test_branch_norms_of_experts_and_gemma_norms_equal_dense_ones(config: BackboneConfig) -> None:
    model = perturbed(Backbone(replace(config, **MOE), "hg+dp")).double()
    norms = branch_norms(model)
    branch = model.layers[1].ffn.inputs.expert_up_proj
    each = [
        torch.diag(out) @ w @ torch.diag(into)
        for w, into, out in zip(branch.weight, branch.scale_in(), branch.scale_out(), strict=True)
    ]
    for e, matrix in enumerate(each):
        torch.testing.assert_close(norms[f"layer1/expert_up_proj/effective/expert{e}"], matrix.detach().norm())
    mean = torch.stack([matrix.detach().norm() for matrix in each]).mean()
    torch.testing.assert_close(norms["layer1/expert_up_proj/effective"], mean)
    assert not any(key.startswith("mean/") and "/expert0" in key for key in norms)

    model = perturbed(Backbone(replace(config, **GEMMA))).double()
    norms = branch_norms(model)
    gamma = model.layers[0].attn.q_norm.scale().detach()
    torch.testing.assert_close(norms["layer0/q_norm/gamma"], gamma.square().mean().sqrt())
    assert {"layer0/k_norm/gamma", "layer1/attn_post_norm/gamma", "mean/ffn_post_norm/gamma"} <= set(norms)
    assert not any("/attn_norm/" in key or "/norm/" in key for key in norms)
