"""The mixture of experts against a plain loop over tokens and experts, dispatch against indexing,
in float64."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from lightning_sv import Backbone, BackboneConfig
from lightning_sv.nn import RouterConfig, router_loss
from lightning_sv.nn.dispatch import combine, dispatch, layout, weights_by_row
from lightning_sv.nn.moe import MixtureOfExperts
from lightning_sv.optim import OptimConfig, build_optimizer, parameter_table, role_groups
from tests.conftest import EVERY_BUILD, MOE, gammas, perturbed, thinned
from tests.scale.test_branch import leaf, rms, scaled

EPS = 0.1


def branch(moe: MixtureOfExperts, name: str, xhat: Tensor, expert: int | None = None) -> Tensor:
    """One matrix, of one expert."""
    owner = getattr(moe.inputs, name)
    weight = owner.weight
    (into, out) = gammas(moe.inputs, name)
    if expert is not None:
        weight = weight[expert]
        into = into if into is None or into.ndim == 1 else into[expert]
        out = None if out is None else out[expert]
    applied = owner.scale_in is None  # by the norm
    return scaled(xhat, weight, (None if applied else into, out), owner.norm_width, EPS)


def plain(moe: MixtureOfExperts, x: Tensor) -> Tensor:
    """One token and one expert at a time."""
    config = moe.router
    rows = []
    for token in x.flatten(0, 1):
        xhat = rms(token, EPS)
        if moe.inputs.norm.scale is not None:
            xhat = moe.inputs.norm.scale() * xhat
        p = branch(moe, "router", xhat).softmax(-1)
        score = p + moe.router_bias if config.balance == "bias" else p
        chosen = score.sort(descending=True).indices[: moe.n_active]
        total = p[chosen].sum() if config.renormalize else 1.0
        y = torch.zeros_like(token)
        for e in chosen.tolist():
            gate = branch(moe, "expert_gate_proj", xhat, e)
            hidden = F.silu(gate) * branch(moe, "expert_up_proj", xhat, e)
            y = y + p[e] / total * (moe.expert_down_proj.weight[e] @ hidden)
        if moe.has_shared:
            gate = branch(moe, "shared_gate_proj", xhat)
            hidden = F.silu(gate) * branch(moe, "shared_up_proj", xhat)
            shared = moe.shared_down_proj.weight @ hidden
            if config.gate_shared:
                shared = branch(moe, "shared_router", xhat).sigmoid() * shared
            y = y + shared
        rows.append(y)
    return torch.stack(rows).view_as(x)


ROUTERS = {
    "bias": {"router": RouterConfig(balance="bias")},
    "raw": {"router": RouterConfig(renormalize=False, gate_shared=True)},
    "unshared": {"n_expert_shared": 0},
    "empty": {"n_expert": 40},  # 24 tokens, 2 choices: most experts have few tokens, some have none
}


def check(config: BackboneConfig, text: str) -> None:
    config = replace(config, norm_eps=EPS)
    moe = perturbed(Backbone(config, text)).double().layers[0].ffn
    if config.router.balance == "bias":
        moe.router_bias.copy_(torch.rand(config.n_expert) / 4)
    x = torch.randn(2, 12, config.d_model, dtype=torch.float64, requires_grad=True)
    ours, routing = moe(x)
    theirs = plain(moe, x)
    torch.testing.assert_close(ours, theirs)
    assert routing.load.sum() == 24 * config.n_expert_active
    assert config.n_expert != 40 or (routing.load == 0).sum() > 5
    weight = torch.randn_like(ours)
    leaves = [x, *moe.parameters()]
    found = torch.autograd.grad((weight * ours).sum(), leaves, allow_unused=True)
    expected = torch.autograd.grad((weight * theirs).sum(), leaves, allow_unused=True)
    for a, b in zip(found, expected, strict=True):
        assert a is not None
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b)


@pytest.mark.parametrize("text", EVERY_BUILD)
def test_moe_every_strategy_and_gradients_equal_plain_loop(
    text: str, config: BackboneConfig
) -> None:
    check(replace(config, **MOE), text)


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("text", thinned(["llama", "unified"], ["unified"]))
def test_moe_every_router_and_gradients_equal_plain_loop(
    text: str, name: str, config: BackboneConfig
) -> None:
    check(replace(config, **(MOE | ROUTERS[name])), text)


def test_build_optimizer_of_moe_updates_experts_by_muon_router_by_adamw(
    config: BackboneConfig,
) -> None:
    model = Backbone(replace(config, **MOE, router=RouterConfig(gate_shared=True)), "unified")
    optimizer = build_optimizer(role_groups(model, frozenset({"input"})), OptimConfig("muon"), 1e-3)
    kinds = {}
    for row in parameter_table(model, optimizer):
        kinds[row[0].removeprefix("layers.0.ffn.").removesuffix(".weight")] = row[2:4]
    for name in ("router", "shared_router"):
        assert kinds[f"inputs.{name}"] == ["router", "adamw"]
    for name in ("inputs.expert_gate_proj", "expert_down_proj", "shared_down_proj"):
        assert kinds[name] == ["matrix", "muon"]
    assert kinds["inputs.expert_up_proj.scale_in.alpha"] == ["input", "adamw"]


def test_router_under_autocast_is_float32(config: BackboneConfig) -> None:
    moe = Backbone(replace(config, **MOE)).layers[0].ffn
    seen: list[Tensor] = []
    moe.inputs.router.register_forward_hook(lambda _m, _i, out: seen.append(out))
    moe.inputs.expert_up_proj.register_forward_hook(lambda _m, _i, out: seen.append(out))
    with torch.autocast("cpu", torch.bfloat16):
        moe(torch.randn(1, 8, config.d_model))
    assert [out.dtype for out in seen] == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("scale", ["llama", "nop", "hg+dp"])
def test_moe_of_bf16_weights_trains(scale: str, config: BackboneConfig) -> None:
    model = Backbone(replace(config, **MOE), scale).bfloat16()
    tokens = torch.arange(9)[None]
    loss, (routing, *_) = model(tokens[:, :-1], targets=tokens[:, 1:], with_routing=True)
    loss.backward()
    assert routing.probability.dtype == torch.float32 and loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_router_losses_equal_hugging_face_and_paper(config: BackboneConfig) -> None:
    from transformers.models.qwen2_moe.modeling_qwen2_moe import load_balancing_loss_func

    config = replace(config, **MOE)
    model = Backbone(config).double()
    logits: list[Tensor] = []
    for layer in model.layers:
        layer.ffn.inputs.router.register_forward_hook(lambda _m, _i, out: logits.append(out))
    _, routings = model(torch.randint(0, config.vocab_size, (3, 16)), with_routing=True)
    for found, routing in zip(logits, routings, strict=True):
        theirs = load_balancing_loss_func((found,), config.n_expert, config.n_expert_active)
        expected = theirs.item() / config.n_expert_active
        assert routing.balance_loss.item() == pytest.approx(expected, rel=1e-6)  # theirs is float32
        torch.testing.assert_close(routing.z_loss, found.logsumexp(-1).square().mean())
        entropy = torch.distributions.Categorical(logits=found).entropy().mean()
        torch.testing.assert_close(routing.entropy, entropy)
    mean = (routings[0].balance_loss + routings[1].balance_loss) / 2
    torch.testing.assert_close(router_loss(routings, config), 0.01 * mean)
    z = replace(config, router=RouterConfig(balance="none", z_coef=1e-3))
    mean = (routings[0].z_loss + routings[1].z_loss) / 2
    torch.testing.assert_close(router_loss(routings, z), 1e-3 * mean)
    assert router_loss([], config) == 0.0
    for balance in ("bias", "none"):
        assert router_loss(routings, replace(config, router=RouterConfig(balance=balance))) == 0.0
    routing = routings[0]._replace(total=routings[0].load.roll(1))  # of all devices
    share = routing.total / routing.total.sum()
    expected = config.n_expert * (share * routing.probability).sum()
    torch.testing.assert_close(routing.balance_loss, expected)


def test_move_bias_changes_the_choice_and_not_the_weights(config: BackboneConfig) -> None:
    config = replace(config, **MOE, router=RouterConfig(balance="bias", bias_rate=0.25))
    moe = Backbone(config).layers[0].ffn
    moe.move_bias(torch.tensor([10.0, 0, 4, 4, 4, 2]))  # mean 4
    assert moe.router_bias.tolist() == [-0.25, 0.25, 0, 0, 0, 0.25]
    weights, experts, _ = moe._route(torch.randn(50, config.d_model))
    assert (experts != 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(50))


@st.composite
def routings(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Ids with all tokens on one expert, idle experts, ids named twice, and fewer choices than
    experts."""
    n_expert = draw(st.integers(1, 9))
    k = draw(st.integers(1, 4))
    n = draw(st.integers(1, 40))
    busy = draw(st.lists(st.integers(0, n_expert - 1), min_size=1, max_size=n_expert))
    flat = draw(st.lists(st.sampled_from(busy), min_size=n * k, max_size=n * k))
    return torch.tensor(flat).view(n, k), n_expert


@given(routings())
def test_dispatch_and_combine_equal_plain_indexing(routing: tuple[Tensor, int]) -> None:
    experts, n_expert = routing
    made = layout(experts, n_expert)
    x = leaf(len(experts), 3)
    y = leaf(len(made.source), 3)
    weights = torch.rand(experts.shape, dtype=torch.float64, requires_grad=True)
    padded = torch.cat([x, torch.zeros(1, 3)])[made.source]
    pairs = [
        (dispatch(x, made), padded, [x]),
        (combine(y, made), y[made.position].sum(1), [y]),
        (weights_by_row(weights, made)[made.position], weights, [weights]),
    ]
    for ours, theirs, leaves in pairs:
        torch.testing.assert_close(ours, theirs)
        grad = torch.randn_like(theirs)
        torch.testing.assert_close(
            torch.autograd.grad(ours, leaves, grad), torch.autograd.grad(theirs, leaves, grad)
        )


def test_dispatch_and_combine_pass_gradgradcheck() -> None:
    made = layout(torch.tensor([[0, 2], [2, 3], [0, 3]]), 4)
    for function, tensors in (
        (lambda x: dispatch(x, made), (leaf(3, 2),)),
        (lambda y: combine(y, made), (leaf(len(made.source), 2),)),
        (lambda w: weights_by_row(w, made), (leaf(3, 2),)),
    ):
        assert torch.autograd.gradgradcheck(function, tensors)
