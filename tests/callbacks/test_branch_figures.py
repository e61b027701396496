"""Figures of branches against dense matrices: norms, and the preconditioner of the gradient
flow."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightning_sv import Backbone, BackboneConfig, ScaleOptions
from lightning_sv.callbacks import branch_norms, preconditioner_figures
from lightning_sv.callbacks.preconditioner import beta_gradients, parameterization_preconditioner
from lightning_sv.callbacks.tensorboard_layout import chart_layout
from lightning_sv.nn import RouterConfig, next_token_loss
from lightning_sv.scale.branch import BranchGroup
from lightning_sv.scale.vector import ExponentialScale, OriginalSpaceScale, ScaleVector
from tests.conftest import GEMMA, MOE, gammas, perturbed


def parts(group: BranchGroup, name: str) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Return W, the branch's scale vectors by side, and the matrix of their products, by which each
    entry is scaled."""
    weight = getattr(group, name).weight.detach()
    by_side = zip(("in", "out"), gammas(group, name), strict=True)
    found = {side: gamma.detach() for side, gamma in by_side if gamma is not None}
    ones = {"out": weight.new_ones(len(weight)), "in": weight.new_ones(weight.shape[1])} | found
    return weight, found, torch.outer(ones["out"], ones["in"])


@pytest.mark.parametrize("text", ["llama", "hg+dp+or", "unified", "nop"])
def test_branch_norms_equal_norms_of_dense_matrices(text: str, config: BackboneConfig) -> None:
    model = perturbed(Backbone(config, text)).double()
    norms = branch_norms(model)
    for name in ("q_proj", "k_proj", "v_proj"):
        per_layer = []
        for i, layer in enumerate(model.layers):
            weight, gammas, field = parts(layer.attn.qkv, name)
            for side in ("in", "out"):
                assert (f"layer{i}/{name}/gamma_{side}" in norms) == (side in gammas)
            for side, gamma in gammas.items():
                torch.testing.assert_close(
                    norms[f"layer{i}/{name}/gamma_{side}"], gamma.square().mean().sqrt()
                )
            torch.testing.assert_close(norms[f"layer{i}/{name}/W"], weight.norm())
            per_layer.append((weight * field).norm())
            torch.testing.assert_close(norms[f"layer{i}/{name}/effective"], per_layer[-1])
        torch.testing.assert_close(norms[f"mean/{name}/effective"], torch.stack(per_layer).mean())
    assert ("layer0/q_proj/gamma_in" in norms) == (text != "nop")
    assert "head/lm_head/effective" in norms
    tags = [
        tag for page in chart_layout(norms).values() for _, tags in page.values() for tag in tags
    ]
    assert {tag.removeprefix("branch_norm/") for tag in tags} <= set(norms)


def test_branch_norms_of_experts_and_gemma_norms_equal_dense_ones(config: BackboneConfig) -> None:
    model = perturbed(Backbone(replace(config, **MOE), "hg+dp")).double()
    norms = branch_norms(model)
    branch = model.layers[1].ffn.inputs.expert_up_proj
    matrices = (
        branch.scale_out().unsqueeze(-1) * branch.weight.detach() * branch.scale_in().unsqueeze(-2)
    )
    expected = matrices.detach().flatten(1).norm(dim=1)
    found = torch.stack([norms[f"layer1/expert_up_proj/effective/expert{e}"] for e in range(6)])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(norms["layer1/expert_up_proj/effective"], expected.mean())
    assert not any(key.startswith("mean/") and "/expert0" in key for key in norms)

    model = perturbed(Backbone(replace(config, **GEMMA))).double()
    norms = branch_norms(model)
    gamma = model.layers[0].attn.q_norm.scale().detach()
    torch.testing.assert_close(norms["layer0/q_norm/gamma"], gamma.square().mean().sqrt())
    assert {
        "layer0/k_norm/gamma",
        "layer1/attn_post_norm/gamma",
        "mean/ffn_post_norm/gamma",
    } <= set(norms)
    assert not any("/attn_norm/" in key or "/norm/" in key for key in norms)


def dense_ends(weight: Tensor, gamma: Tensor) -> tuple[float, float]:
    """Smallest and largest eigenvalue over the columns' gamma_j^2 I + w_j w_j^T."""
    w, squares = weight.double().T, gamma.double().square()
    matrices = torch.diag_embed(squares[:, None].expand_as(w)) + w[:, :, None] * w[:, None, :]
    values = torch.linalg.eigvalsh(matrices)
    return values.min().item(), values.max().item()


@pytest.mark.parametrize("text", ["llama", "hg+dp+or", "ap", "hg+dnp+er"])
def test_preconditioner_figures_of_a_branch_equal_dense_ones(
    text: str, config: BackboneConfig
) -> None:
    model = perturbed(Backbone(config, text))
    figures = preconditioner_figures(model)
    per_layer = []
    for i, layer in enumerate(model.layers):
        where = f"layer{i}/up_proj"
        weight, gammas, field = parts(layer.ffn.gate_up, "up_proj")
        field = field.abs().double()
        assert figures[f"{where}/field_spread"].item() == pytest.approx(
            (field.max() / field.min()).item(), rel=1e-5
        )
        assert figures[f"{where}/field_log_std"].item() == pytest.approx(
            field.log().std(correction=0).item(), rel=1e-4
        )
        for side, matrix in (("in", weight), ("out", weight.T)):
            assert (f"{where}/drift_{side}" in figures) == (side in gammas)
            if side in gammas:
                ends = (
                    figures[f"{where}/eig_low_{side}"].item(),
                    figures[f"{where}/eig_high_{side}"].item(),
                )
                assert ends == pytest.approx(dense_ends(matrix, gammas[side]), rel=1e-5)
                drift = (gammas[side] - 1).square().mean().sqrt().item()
                assert figures[f"{where}/drift_{side}"].item() == pytest.approx(drift, rel=1e-5)
        per_layer.append(figures[f"{where}/field_log_std"])
    assert figures["mean/up_proj/field_log_std"] == torch.stack(per_layer).mean()
    assert "head/lm_head/field_spread" in figures
    beta = [
        p
        for name, p in model.named_parameters()
        if name.endswith("layers.0.ffn.gate_up.up_proj.scale_out.beta")
    ]
    assert ("layer0/up_proj/beta_out" in figures) == bool(beta)
    if beta:
        assert figures["layer0/up_proj/beta_out"].item() == pytest.approx(beta[0].item())


def test_preconditioner_figures_of_dead_entries_experts_and_gemma_norms(
    config: BackboneConfig,
) -> None:
    model = perturbed(Backbone(replace(config, **GEMMA, **MOE), "hg+dp"))
    with torch.no_grad():
        model.layers[0].attn.q_norm.scale.gamma[:4] *= -1
        model.layers[0].attn.q_norm.scale.gamma[7] = 0
        model.layers[1].ffn.inputs.expert_up_proj.scale_in.gamma[2, :8] *= -1
    figures = preconditioner_figures(model)
    assert (
        figures["layer0/q_norm/negative_out"] == 4 / 16
        and figures["layer0/q_norm/dead_out"] == 1 / 16
    )
    assert "layer0/q_norm/drift_in" not in figures and "layer0/q_norm/field_spread" not in figures
    assert figures["layer1/expert_up_proj/negative_in"].item() == pytest.approx(8 / 32 / 6)
    branch = model.layers[1].ffn.inputs.expert_up_proj
    triples = list(zip(branch.weight, branch.scale_in(), branch.scale_out(), strict=True))
    ends = [dense_ends(w.detach(), v.detach()) for w, v, _ in triples]
    assert figures["layer1/expert_up_proj/eig_high_in"].item() == pytest.approx(
        sum(e[1] for e in ends) / 6, rel=1e-5
    )
    spreads = [
        (torch.outer(u, v).abs().max() / torch.outer(u, v).abs().min()).item()
        for _, v, u in triples
    ]
    assert figures["layer1/expert_up_proj/field_spread"].item() == pytest.approx(
        sum(spreads) / 6, rel=1e-4
    )
    assert figures["mean/q_norm/negative_out"] == 4 / 16 / 2
    assert preconditioner_figures(Backbone(config, "nop")) == {}


@pytest.mark.parametrize("cls", [OriginalSpaceScale, ExponentialScale])
def test_parameterization_preconditioner_equals_the_jacobian(cls: type[ScaleVector]) -> None:
    vector = cls(7, "input").double()
    with torch.no_grad():
        vector.set_gamma(torch.rand(7, dtype=torch.float64) + 0.5)
        vector.alpha.mul_(1.7)
    values = dict(vector.named_parameters())
    jacobians = torch.func.jacrev(lambda v: torch.func.functional_call(vector, v, ()))(values)
    j = torch.cat([jacobians["alpha"], jacobians["beta"]], -1)
    p, g = j @ j.T, torch.nn.functional.normalize(vector().detach(), dim=0)
    figures = parameterization_preconditioner(vector)
    assert figures["p_radial"].item() == pytest.approx((g @ p @ g).item(), rel=1e-12)
    assert figures["p_tangent"].item() == pytest.approx(
        ((p.trace() - g @ p @ g) / 6).item(), rel=1e-12
    )
    assert (
        parameterization_preconditioner(type("Own", (cls,), {})(7, "input")) == {}
    )  # its formula is not known


@pytest.mark.parametrize("form", ["or", "er"])
def test_preconditioner_figures_of_a_matrix_with_one_row_equal_dense_ones(
    form: str, config: BackboneConfig
) -> None:
    moe = replace(config, **MOE, n_expert_shared=1, router=RouterConfig(gate_shared=True))
    model = perturbed(Backbone(moe, f"hg+dp+{form}"))
    weight, gammas, _ = parts(model.layers[0].ffn.inputs, "shared_router")
    assert weight.shape == (1, 32)
    figures = preconditioner_figures(model)
    for side, matrix in (("in", weight), ("out", weight.T)):
        ends = [figures[f"layer0/shared_router/eig_{end}_{side}"].item() for end in ("low", "high")]
        assert ends == pytest.approx(dense_ends(matrix, gammas[side]), rel=1e-5)
    assert figures["layer0/shared_router/p_tangent_out"].item() == pytest.approx(0, abs=1e-5)
    assert figures["layer0/shared_router/p_tangent_in"] > 0.1


@pytest.mark.parametrize("text", ["llama", "dp"])
def test_imbalance_gamma_shared_by_experts_counts_all_their_matrices(
    text: str, config: BackboneConfig
) -> None:
    model = perturbed(Backbone(replace(config, **MOE), text))
    group = model.layers[0].ffn.inputs
    gamma = group.norm.scale().detach().square()
    lengths = (
        torch.cat([branch.weight.detach().reshape(-1, 32) for _, branch in group.branches()])
        .square()
        .sum(0)
    )
    expected = ((gamma - lengths).abs() / (gamma + lengths)).mean().item()
    figures = preconditioner_figures(model)
    for name in ("router", "expert_gate_proj", "expert_up_proj"):
        assert figures[f"layer0/{name}/imbalance_in"].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("text", ["llama", "hg+dp"])
def test_imbalance_shared_gamma_counts_all_its_matrices(text: str, config: BackboneConfig) -> None:
    model = perturbed(Backbone(config, text))
    group = model.layers[0].attn.qkv
    names = ["q_proj", "k_proj", "v_proj"] if text == "llama" else ["k_proj"]
    gamma = gammas(group, "k_proj")[0].detach().square()
    lengths = sum(getattr(group, name).weight.detach().square().sum(0) for name in names)
    expected = ((gamma - lengths).abs() / (gamma + lengths)).mean().item()
    assert preconditioner_figures(model)["layer0/k_proj/imbalance_in"].item() == pytest.approx(
        expected, rel=1e-5
    )


def test_preconditioner_figures_of_a_vector_shared_by_heads_count_the_rows_of_all_heads(
    config: BackboneConfig,
) -> None:
    model = perturbed(
        Backbone(replace(config, n_head=4), "hg+dp+or", ScaleOptions(share_heads=["q_proj"]))
    )
    branch = model.layers[0].attn.qkv.q_proj
    g, rows = branch.scale_out().detach()[:8], branch.weight.detach().view(4, 8, 32)
    lengths = torch.stack([rows[:, j].square().sum() for j in range(8)])
    expected = ((g.square() - lengths).abs() / (g.square() + lengths)).mean().item()
    figures = preconditioner_figures(model)
    assert figures["layer0/q_proj/imbalance_out"].item() == pytest.approx(expected, rel=1e-5)
    high = dense_ends(rows.transpose(1, 2).reshape(-1, 8), g)[1]
    assert figures["layer0/q_proj/eig_high_out"].item() == pytest.approx(high, rel=1e-5)
    own = parameterization_preconditioner(branch.scale_out.vector)
    assert figures["layer0/q_proj/p_radial_out"] == own["p_radial"] == 8
    assert figures["layer0/q_proj/p_tangent_out"] == own["p_tangent"]


def test_beta_gradients_of_the_input_vanish_under_dnp_only(config: BackboneConfig) -> None:
    """The loss depends on it through the norm's eps only, which is made small here."""
    tokens = torch.randint(0, config.vocab_size, (4, 33))
    ratios = {}
    for text in ("hg+dnp+or", "hg+dp+or"):
        model = perturbed(Backbone(replace(config, norm_eps=1e-12), text)).double()
        next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        gradients = beta_gradients(model)
        ratios[text] = (
            gradients["mean/up_proj/beta_in_grad"] / gradients["mean/up_proj/beta_out_grad"]
        )
    assert ratios["hg+dnp+or"] < 1e-8 < 1e-2 < ratios["hg+dp+or"]
