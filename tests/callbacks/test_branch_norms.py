"""The logged norms against a direct computation."""

import pytest
import torch

from lightning_sv import Backbone, BackboneConfig
from lightning_sv.callbacks import branch_norms
from lightning_sv.callbacks.branch_norms import chart_layout
from tests.conftest import perturbed


@pytest.mark.parametrize("text", ["llama", "hg+dp+or", "unified", "nop"])
def test_norms_are_those_of_the_matrices(text: str, config: BackboneConfig) -> None:
    model = perturbed(Backbone(config, text))
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
    tags = [tag for page in chart_layout(model).values() for _, tags in page.values() for tag in tags]
    assert {tag.removeprefix("branch_norm/") for tag in tags} <= set(norms)
    q_chart = chart_layout(model)["Q, K, V"]["effective, mean"][1]
    assert [tag.split("/")[2] for tag in q_chart] == ["q_proj", "k_proj", "v_proj"]
