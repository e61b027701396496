"""Figures of branches against dense matrices: norms, and the preconditioner of the gradient
flow."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightning_sv import Backbone, BackboneConfig, ScaleOptions
from lightning_sv.callbacks import branch_norms, preconditioner_figures
from lightning_sv.callbacks.branch_norms import norm_pages
from lightning_sv.callbacks.preconditioner import beta_gradients, parameterization_preconditioner
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


def figures_of(figures: dict[str, Tensor], place: str) -> dict[str, float]:
    """Return the figures of one branch, without its name."""
    prefix = f"{place}/"
    return {
        key.removeprefix(prefix): value.item()
        for key, value in figures.items()
        if key.startswith(prefix)
    }


def numbers(figures: dict[str, Tensor]) -> dict[str, float]:
    return {key: value.item() for key, value in figures.items()}


@pytest.mark.parametrize("text", ["llama", "hg+dp+or", "unified", "nop"])
def test_branch_norms_equal_norms_of_dense_matrices(text: str, config: BackboneConfig) -> None:
    model = perturbed(Backbone(config, text)).double()
    norms = branch_norms(model)
    for name in ("q_proj", "k_proj", "v_proj"):
        per_layer = []
        for i, layer in enumerate(model.layers):
            weight, gammas, field = parts(layer.attn.qkv, name)
            effective = (weight * field).norm()
            expected = {"W": weight.norm(), "effective": effective}
            for side, gamma in gammas.items():
                expected[f"gamma_{side}"] = gamma.square().mean().sqrt()
            assert figures_of(norms, f"layer{i}/{name}") == pytest.approx(numbers(expected))
            per_layer.append(effective)
        torch.testing.assert_close(norms[f"mean/{name}/effective"], torch.stack(per_layer).mean())
    assert "head/lm_head/effective" in norms
    drawn: set[str] = set()
    for charts in norm_pages("branch_norm", norms).values():
        drawn.update(*charts.values())
    assert drawn <= {f"branch_norm/{key}" for key in norms}


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
    w = weight.double().T
    squares = gamma.double().square()
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
        expected = {
            "field_spread": (field.max() / field.min()).item(),
            "field_log_std": field.log().std(correction=0).item(),
        }
        for side, gamma in gammas.items():
            low, high = dense_ends(weight if side == "in" else weight.T, gamma)
            expected[f"eig_low_{side}"] = low
            expected[f"eig_high_{side}"] = high
            expected[f"drift_{side}"] = (gamma - 1).square().mean().sqrt().item()
        of_branch = figures_of(figures, where)
        assert {key: of_branch[key] for key in expected} == pytest.approx(expected, rel=1e-4)
        assert ("drift_in" in of_branch) == ("in" in gammas)
        per_layer.append(figures[f"{where}/field_log_std"])
    assert figures["mean/up_proj/field_log_std"] == torch.stack(per_layer).mean()
    assert "head/lm_head/field_spread" in figures
    beta = dict(model.named_parameters()).get("layers.0.ffn.gate_up.up_proj.scale_out.beta")
    assert ("layer0/up_proj/beta_out" in figures) == (beta is not None)
    if beta is not None:
        assert figures["layer0/up_proj/beta_out"].item() == pytest.approx(beta.item())


def test_preconditioner_figures_of_dead_entries_experts_and_gemma_norms(
    config: BackboneConfig,
) -> None:
    model = perturbed(Backbone(replace(config, **GEMMA, **MOE), "hg+dp"))
    with torch.no_grad():
        model.layers[0].attn.q_norm.scale.gamma[:4] *= -1
        model.layers[0].attn.q_norm.scale.gamma[7] = 0
        model.layers[1].ffn.inputs.expert_up_proj.scale_in.gamma[2, :8] *= -1
    figures = preconditioner_figures(model)
    assert figures["layer0/q_norm/negative_out"] == 4 / 16
    assert figures["layer0/q_norm/dead_out"] == 1 / 16
    assert "layer0/q_norm/drift_in" not in figures and "layer0/q_norm/field_spread" not in figures
    assert figures["layer1/expert_up_proj/negative_in"].item() == pytest.approx(8 / 32 / 6)
    branch = model.layers[1].ffn.inputs.expert_up_proj
    high = 0.0
    spread = 0.0
    for weight, v, u in zip(branch.weight, branch.scale_in(), branch.scale_out(), strict=True):
        field = torch.outer(u, v).abs()
        high += dense_ends(weight.detach(), v.detach())[1] / 6
        spread += (field.max() / field.min()).item() / 6
    of_experts = figures_of(figures, "layer1/expert_up_proj")
    assert of_experts["eig_high_in"] == pytest.approx(high, rel=1e-5)
    assert of_experts["field_spread"] == pytest.approx(spread, rel=1e-4)
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
    p = j @ j.T
    g = torch.nn.functional.normalize(vector().detach(), dim=0)
    radial = g @ p @ g
    expected = {"p_radial": radial, "p_tangent": (p.trace() - radial) / 6}
    found = numbers(parameterization_preconditioner(vector))
    assert found == pytest.approx(numbers(expected), rel=1e-12)
    own = type("Own", (cls,), {})(7, "input")
    assert parameterization_preconditioner(own) == {}  # its formula is not known


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
    rows = [branch.weight.detach().reshape(-1, 32) for _, branch in group.branches()]
    lengths = torch.cat(rows).square().sum(0)
    expected = ((gamma - lengths).abs() / (gamma + lengths)).mean().item()
    figures = preconditioner_figures(model)
    for name in ("router", "expert_gate_proj", "expert_up_proj"):
        assert figures[f"layer0/{name}/imbalance_in"].item() == pytest.approx(expected, rel=1e-5)


def test_preconditioner_figures_of_a_vector_shared_by_heads_count_the_rows_of_all_heads(
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
