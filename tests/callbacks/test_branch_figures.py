"""Figures of branches against dense matrices: norms, drift, beta and balance."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sv import Backbone, BackboneConfig, ScaleOptions
from lightning_sv.callbacks import branch_norms, scale_vector_figures
from lightning_sv.callbacks.scale_vector_monitor import beta_gradients
from lightning_sv.nn import next_token_loss
from lightning_sv.scale.branch import BranchGroup
from tests.conftest import GEMMA, MOE, gammas, perturbed


def gammas_of(group: BranchGroup, name: str) -> dict[str, Tensor]:
    """Return the scale vectors of a branch by side."""
    by_side = zip(("in", "out"), gammas(group, name), strict=True)
    return {side: gamma.detach() for side, gamma in by_side if gamma is not None}


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def figures_of(figures: dict[str, Tensor], place: str) -> dict[str, float]:
    """Return the figures of one branch, without its name."""
    prefix = f"{place}/"
    return {
        key.removeprefix(prefix): value.item()
        for key, value in figures.items()
        if key.startswith(prefix)
    }


@pytest.mark.parametrize("text", ["llama", "hg+dp+or", "unified", "nop"])
def test_branch_norms_equal_norms_of_dense_matrices(text: str, config: BackboneConfig) -> None:
    model = perturbed(Backbone(config, text)).double()
    norms = branch_norms(model)
    for name in ("q_proj", "k_proj", "v_proj"):
        per_layer = []
        for i, layer in enumerate(model.layers):
            weight = getattr(layer.attn.qkv, name).weight.detach()
            vectors = gammas_of(layer.attn.qkv, name)
            effective = weight * vectors.get("in", torch.ones(()))
            effective = vectors.get("out", torch.ones(1)).unsqueeze(-1) * effective
            expected = {"W": weight.norm().item(), "effective": effective.norm().item()}
            expected |= {f"gamma_{side}": rms(gamma) for side, gamma in vectors.items()}
            assert figures_of(norms, f"layer{i}/{name}") == pytest.approx(expected)
            per_layer.append(expected["effective"])
        assert norms[f"mean/{name}/effective"].item() == pytest.approx(sum(per_layer) / 2)
    assert "head/lm_head/effective" in norms


@pytest.mark.parametrize("experts", [{}, MOE])
def test_figures_of_bf16_weights_are_those_of_the_same_weights_in_float32(
    experts: dict[str, Any], config: BackboneConfig
) -> None:
    narrow = perturbed(Backbone(replace(config, **experts), "hg+dp")).bfloat16()
    wide = deepcopy(narrow).float()
    for figures in (branch_norms, scale_vector_figures):
        expected = {key: value.item() for key, value in figures(wide).items()}
        found = {key: value.item() for key, value in figures(narrow).items()}
        assert found == pytest.approx(expected, rel=1e-6)


def test_branch_norms_of_experts_equal_dense_ones(config: BackboneConfig) -> None:
    model = perturbed(Backbone(replace(config, **MOE), "hg+dp")).double()
    norms = branch_norms(model)
    branch = model.layers[1].ffn.inputs.expert_up_proj
    matrices = branch.scale_out().unsqueeze(-1) * branch.weight * branch.scale_in().unsqueeze(-2)
    expected = matrices.detach().flatten(1).norm(dim=1)
    found = torch.stack([norms[f"layer1/expert_up_proj/effective/expert{e}"] for e in range(6)])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(norms["layer1/expert_up_proj/effective"], expected.mean())
    assert not any(key.startswith("mean/") and "/expert0" in key for key in norms)


def test_branch_norms_of_a_gemma_have_its_norms(config: BackboneConfig) -> None:
    model = perturbed(Backbone(replace(config, **GEMMA))).double()
    norms = branch_norms(model)
    gamma = model.layers[0].attn.q_norm.scale()
    assert norms["layer0/q_norm/gamma"].item() == pytest.approx(rms(gamma))
    others = {"layer0/k_norm/gamma", "layer1/attn_post_norm/gamma", "mean/ffn_post_norm/gamma"}
    assert others <= norms.keys()
    assert not any("/attn_norm/" in key or "/norm/" in key for key in norms)


@pytest.mark.parametrize("text", ["llama", "hg+dp+or", "ap", "nop"])
def test_scale_vector_drift_and_beta_equal_those_of_the_vectors(
    text: str, config: BackboneConfig
) -> None:
    model = perturbed(Backbone(config, text))
    figures = scale_vector_figures(model)
    expected: dict[str, float] = {}
    vectors = [gammas_of(layer.ffn.gate_up, "up_proj") for layer in model.layers]
    for side in vectors[0]:
        drifts = [rms(of_layer[side] - 1) for of_layer in vectors]
        expected |= {f"layer{i}/up_proj/drift_{side}": drift for i, drift in enumerate(drifts)}
        expected[f"mean/up_proj/drift_{side}"] = sum(drifts) / len(drifts)
    beta = dict(model.named_parameters()).get("layers.0.ffn.gate_up.up_proj.scale_out.beta")
    if beta is not None:
        expected["layer0/up_proj/beta_out"] = beta.item()
    assert {key: figures[key].item() for key in expected} == pytest.approx(expected, rel=1e-5)
    assert ("layer0/up_proj/beta_out" in figures) == (beta is not None)
    assert bool(figures) == (text != "nop")


def test_scale_vector_figures_of_a_norm_have_no_imbalance(config: BackboneConfig) -> None:
    figures = scale_vector_figures(Backbone(replace(config, **GEMMA, **MOE), "hg+dp"))
    assert figures_of(figures, "layer0/q_norm") == {"drift_out": 0}


def test_imbalance_of_a_column_of_zeros_is_zero(config: BackboneConfig) -> None:
    model = Backbone(config, "hg")
    before = scale_vector_figures(model)["layer0/q_proj/imbalance_in"].item()
    q_proj = model.layers[0].attn.qkv.q_proj
    lengths = q_proj.weight.detach().square().sum(0)
    of_column = ((1 - lengths[0]).abs() / (1 + lengths[0])).item()
    with torch.no_grad():
        q_proj.weight[:, 0] = 0
        q_proj.scale_in.gamma[0] = 0
    after = scale_vector_figures(model)["layer0/q_proj/imbalance_in"].item()
    assert before - after == pytest.approx(of_column / len(lengths), rel=1e-4)


@pytest.mark.parametrize("text", ["llama", "dp"])
def test_imbalance_gamma_shared_by_experts_counts_all_their_matrices(
    text: str, config: BackboneConfig
) -> None:
    model = perturbed(Backbone(replace(config, **MOE), text))
    group = model.layers[0].ffn.inputs
    gamma = group.norm.scale().detach().square()
    rows = [branch.weight.detach().reshape(-1, 32) for _, branch in group.branches()]
    lengths = torch.cat(rows).square().sum(0)
    expected = ((gamma - lengths).abs() / (gamma + lengths)).mean().item()
    figures = scale_vector_figures(model)
    for name in ("router", "expert_gate_proj", "expert_up_proj"):
        assert figures[f"layer0/{name}/imbalance_in"].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("heads", [[], ["q_proj"]])
def test_drift_is_the_distance_from_the_initial_gamma(
    heads: list[str], config: BackboneConfig
) -> None:
    options = ScaleOptions(initial_gamma_out=0.2, share_heads=heads)
    figures = scale_vector_figures(Backbone(config, "hg+dp+or", options))
    assert figures["layer0/q_proj/drift_out"].item() == pytest.approx(0, abs=1e-7)
    assert figures["layer0/q_proj/drift_in"].item() == 0


def test_scale_vector_figures_of_a_vector_shared_by_heads_count_the_rows_of_all_heads(
    config: BackboneConfig,
) -> None:
    model = perturbed(
        Backbone(replace(config, n_head=4), "hg+dp+or", ScaleOptions(share_heads=["q_proj"]))
    )
    branch = model.layers[0].attn.qkv.q_proj
    g = branch.scale_out().detach()[:8]
    rows = branch.weight.detach().view(4, 8, 32)
    lengths = torch.stack([rows[:, j].square().sum() for j in range(8)])
    expected = ((g.square() - lengths).abs() / (g.square() + lengths)).mean().item()
    figures = scale_vector_figures(model)
    assert figures["layer0/q_proj/imbalance_out"].item() == pytest.approx(expected, rel=1e-5)


def test_beta_gradients_of_the_input_vanish_under_dnp_only(config: BackboneConfig) -> None:
    """The loss depends on it through the norm's eps only, which is made small here."""
    tokens = torch.randint(0, config.vocab_size, (4, 33))
    ratios = {}
    for text in ("hg+dnp+or", "hg+dp+or"):
        model = perturbed(Backbone(replace(config, norm_eps=1e-12), text)).double()
        next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        of_side = beta_gradients(model)
        ratios[text] = of_side["mean/up_proj/beta_in_grad"] / of_side["mean/up_proj/beta_out_grad"]
    assert ratios["hg+dnp+or"] < 1e-8 < 1e-2 < ratios["hg+dp+or"]
