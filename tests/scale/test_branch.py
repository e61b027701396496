"""The folded product against the naive one, and what each placement computes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_sv import Backbone, BackboneConfig
from lightning_sv.errors import ConfigError
from lightning_sv.scale import (
    Branch,
    DirectScale,
    RMSNorm,
    ScaleBuilder,
    ScaledLinear,
    ScaleOptions,
    ScaleStrategy,
    definitions,
    normalize,
)
from lightning_sv.scale.fast import effective_weight, inverse_rms_of_product, scaled_product
from lightning_sv.scale.vector import HeadShared
from tests.conftest import EVERY_BUILD, gammas, perturbed

D = 6
OUT = 8
HEAD = 4
EPS = 0.1


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def rms(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def scaled(
    xhat: Tensor,
    weight: Tensor,
    gammas: tuple[Tensor | None, Tensor | None],
    norm_width: int | None,
    eps: float,
) -> Tensor:
    """The paper's formula, word for word: scale the activation, multiply, normalize, scale."""
    gamma_in, gamma_out = gammas
    y = F.linear(xhat if gamma_in is None else gamma_in * xhat, weight)
    if norm_width:
        y = rms(y.unflatten(-1, (-1, norm_width)), eps).flatten(-2)
    return y if gamma_out is None else gamma_out * y


def naive(group, name: str, x: Tensor) -> Tensor:
    branch = getattr(group, name)
    return scaled(rms(x, EPS), branch.weight, gammas(group, name), branch.norm_width, EPS)


@pytest.mark.parametrize("share_heads", [[], ["q", "k"]])
@pytest.mark.parametrize("text", EVERY_BUILD)
def test_branch_group_and_gradients_equal_naive_formula(text: str, share_heads: list[str]) -> None:
    options = ScaleOptions(share_heads=share_heads)
    build = ScaleBuilder(ScaleStrategy.parse(text), options, eps=EPS)
    heads = Branch(OUT, HEAD, n_head=OUT // HEAD)
    group = build.group("norm", D, {"q": heads, "k": heads, "u": Branch(OUT, OUT)})
    shared = [isinstance(group.vectors(name)[1], HeadShared) for name in group.names]
    assert shared == [
        name in share_heads and build.strategy.placement_row.scale_out for name in group.names
    ]
    for _, branch in group.branches():
        torch.nn.init.normal_(branch.weight)
    perturbed(group.double())
    x = torch.randn(3, 5, D, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(3, 5, OUT, dtype=torch.float64) for _ in group.names]
    leaves = [x, *group.parameters()]
    fused = sum((w * y).sum() for w, y in zip(weights, group(x), strict=True))
    plain = sum((w * naive(group, n, x)).sum() for w, n in zip(weights, group.names, strict=True))
    torch.testing.assert_close(fused, plain)
    torch.testing.assert_close(
        torch.autograd.grad(fused, leaves), torch.autograd.grad(plain, leaves)
    )


@pytest.mark.parametrize("sides", [(D, None), (None, OUT), (D, OUT)])
def test_scaled_product_passes_gradgradcheck(sides: tuple[int | None, int | None]) -> None:
    gammas = [None if d is None else leaf(d) for d in sides]
    assert torch.autograd.gradgradcheck(scaled_product, (leaf(2, 3, D), leaf(OUT, D), *gammas))


@pytest.mark.parametrize("shape", [None, (D,), (3, D)])
def test_normalize_equals_torch_and_passes_gradcheck(shape: tuple[int, ...] | None) -> None:
    x = leaf(2, 3, D)
    gamma = None if shape is None else leaf(*shape)
    assert torch.autograd.gradcheck(lambda x, g: normalize(x, 0.1, g), (x, gamma))
    assert torch.autograd.gradgradcheck(lambda x, g: normalize(x, 0.1, g), (x, gamma))
    theirs = F.rms_norm(x, (D,), None, 0.1)
    torch.testing.assert_close(
        normalize(x, 0.1, gamma), theirs if gamma is None else theirs * gamma
    )


@pytest.mark.parametrize("text", ["llama", "hg+dp+or", "unified"])
def test_torch_func_gradients_per_row_equal_autograd(text: str) -> None:
    """Also of a single vector, and forward over reverse."""
    group = (
        ScaleBuilder(ScaleStrategy.parse(text))
        .group("attn_norm", 8, {"q_proj": Branch(6, 6)})
        .double()
    )
    values = dict(group.named_parameters())
    x = torch.randn(3, 8, dtype=torch.float64)

    def loss(values: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(group, values, (row,))[0].pow(3).sum()

    rows = torch.func.vmap(torch.func.grad(loss), (None, 0))(values, x)
    hessian = torch.func.hessian(loss)(values, x[0])["q_proj.weight"]["q_proj.weight"]
    weight = group.q_proj.weight
    for i, row in enumerate(x):
        (grad,) = torch.autograd.grad(loss(values, row), weight, create_graph=i == 0)
        torch.testing.assert_close(rows["q_proj.weight"][i], grad)
        if i == 0:
            torch.testing.assert_close(hessian[0, 0], torch.autograd.grad(grad[0, 0], weight)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("lead", [(), (3,)])
def test_effective_weight_and_gradients_equal_definition_bitwise(
    lead: tuple[int, ...], dtype: torch.dtype
) -> None:
    width = torch.promote_types(dtype, torch.float32)
    inputs = [leaf(*lead, OUT, D, dtype=dtype), *(leaf(*lead, d, dtype=width) for d in (D, OUT))]
    weight = torch.randn(*lead, OUT, D, dtype=width)
    results = []
    for form in (effective_weight, definitions.effective_weight):
        value = form(*inputs)
        results.append((value, *torch.autograd.grad(value, inputs, weight)))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    if dtype is torch.float64:
        assert torch.autograd.gradgradcheck(effective_weight, inputs)


def test_inverse_rms_of_many_equal_rows_is_finite_in_float16() -> None:
    """The sums over 2,048 outputs exceed the largest number of float16."""
    generator = torch.Generator().manual_seed(0)
    weight = 0.05 * torch.randn(2048, 64, generator=generator) + 2 * torch.randn(
        64, generator=generator
    )
    x = F.rms_norm(torch.randn(32, 64, generator=generator) + weight[0], (64,))

    def run(dtype: torch.dtype, loss_scale: float) -> list[Tensor]:
        inputs = [each.to(dtype, copy=True).requires_grad_() for each in (x, weight)]
        with torch.autocast("cpu", torch.float16, enabled=dtype == torch.float32):
            r = inverse_rms_of_product(inputs[0], inputs[1], None, 1e-5)
        gradients = torch.autograd.grad(r.sum() * loss_scale, inputs)
        return [r.double(), *(gradient.double() / loss_scale for gradient in gradients)]

    for found, expected in zip(run(torch.float32, 2.0**16), run(torch.float64, 1.0), strict=True):
        assert (found - expected).norm() < 2e-3 * expected.norm()


@pytest.mark.parametrize(
    "call", [scaled_product, lambda x, w, gamma, _: inverse_rms_of_product(x, w, gamma, 1e-5)]
)
def test_gradients_do_not_depend_on_a_backward_under_autocast(call: Callable[..., Tensor]) -> None:
    tensors = [leaf(*shape, dtype=torch.float32) for shape in ((64, D), (OUT, D), (D,), (OUT,))]
    with torch.autocast("cpu", torch.bfloat16):
        total = call(*tensors).float().sum()
        inside = torch.autograd.grad(total, tensors, retain_graph=True, allow_unused=True)
    for found, expected in zip(
        inside, torch.autograd.grad(total, tensors, allow_unused=True), strict=True
    ):
        assert found is expected is None or torch.equal(found, expected)


def test_scale_options_change_their_site_and_unknown_site_refused() -> None:
    def build(scale: str, **options):
        builder = ScaleBuilder(ScaleStrategy.parse(scale), ScaleOptions(**options))
        group = builder.group(
            "attn_norm", D, {"q_proj": Branch(OUT, HEAD), "v_proj": Branch(OUT, HEAD)}
        )
        return builder, group

    _, group = build("unified", placement_at={"v_proj": "dp"}, freeze_input_beta=True)
    assert group.q_proj.norm_width == HEAD and group.v_proj.norm_width is None
    assert not group.q_proj.scale_in.beta.requires_grad and group.v_proj.scale_in.beta.requires_grad
    for at, trains in (
        ({}, False),
        ({"v_proj": "dp"}, True),
    ):  # a shared beta trains if one branch has no norm
        _, group = build("dnp+or", placement_at=at, freeze_input_beta=True)
        assert group.norm.scale.beta.requires_grad == trains
    _, group = build("unified", role_at={"v_proj.scale_out": "input"})
    assert group.v_proj.scale_out.role == "input" and group.q_proj.scale_out.role == "output"
    with pytest.raises(ValueError, match="placement_at names 'lm_head'"):
        build("unified", placement_at={"lm_head": "dp"})[0].finish()
    with pytest.raises(ValueError, match="role_at names 'v_proj.scale_out'"):
        build("llama", role_at={"v_proj.scale_out": "input"})[0].finish()
    with pytest.raises(ValueError, match="add 'hg'"):
        build("dp", placement_at={"v_proj": "ap"})
    with pytest.raises(ValueError, match="known: nop bp ap dp dnp"):
        ScaleOptions(placement_at={"v_proj": "up"})
    options = ScaleOptions({"lm_head": "dp"}, {"v_proj.scale_out": "input"}, share_heads=["q_proj"])
    assert options.label() == "[lm_head=dp,v_proj.scale_out=input,share_heads=q_proj]"
    with pytest.raises(ConfigError, match="share_scale_out is True"):
        ScaleOptions(share_scale_out=True)


@pytest.mark.parametrize(
    ("scale", "option"),
    [
        ("hg+dp+or", {"freeze_input_beta": True}),
        ("hg+dnp", {"freeze_input_beta": True}),
        ("hg+bp+or", {"initial_gamma_out": 0.5}),
    ],
)
def test_option_without_effect_refused(
    scale: str, option: dict[str, Any], config: BackboneConfig
) -> None:
    with pytest.raises(ConfigError, match=f"scale_options.{next(iter(option))} is"):
        Backbone(config, scale, ScaleOptions(**option))


def test_share_heads_site_without_heads_or_vector_refused(config: BackboneConfig) -> None:
    with pytest.raises(ValueError, match="names 'gate_proj'.*: k_proj q_proj v_proj"):
        Backbone(config, "dp", ScaleOptions(share_heads=["gate_proj"]))
    with pytest.raises(ValueError, match="names 'q_proj'.*: k_proj v_proj"):
        Backbone(
            config, "hg+dp", ScaleOptions(share_heads=["q_proj"], placement_at={"q_proj": "bp"})
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_norm_equals_torch(dtype: torch.dtype) -> None:
    x = torch.randn(3, 8).mul(0.01).to(dtype)
    ours = RMSNorm(8, 1e-3, DirectScale(8, "input")).to(dtype)
    torch.testing.assert_close(ours(x), F.rms_norm(x, (8,), eps=1e-3))


def test_new_matrix_is_uniform_within_one_over_the_root_of_its_inputs() -> None:
    weight = ScaledLinear(16, 400).weight.detach()
    assert 0.24 < weight.max() <= 0.25 and -0.25 <= weight.min() < -0.24


@pytest.mark.parametrize("scale", ["llama", "hg+dnp"])
def test_gradient_of_gamma_in_16_bits_is_rounded_once(scale: str) -> None:
    """In a norm, and in the SwiGLU of normalized outputs; a sum of 65,536 rows in 16 bits is 1.6%
    off."""
    config = BackboneConfig(d_model=32, n_layer=1, n_head=2, vocab_size=64)
    model = perturbed(Backbone(config, scale)).bfloat16()
    ffn = model.layers[0].ffn
    vectors = [parameter for name, parameter in ffn.named_parameters() if "gamma" in name]
    x = torch.randn(2**16, 32).bfloat16()
    grads = [torch.autograd.grad(ffn(x)[0].square().sum(), vectors)]
    grads.append(torch.autograd.grad(ffn.double()(x.double())[0].square().sum(), vectors))
    for rounded, exact in zip(*grads, strict=True):
        assert rounded.dtype == torch.bfloat16
        assert (rounded.double() - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("width", [0, 3])
def test_builder_refuses_widths_that_do_not_divide(width: int) -> None:
    with pytest.raises(ConfigError, match="dnp_width"):
        ScaleBuilder("unified").group("attn_norm", D, {"u": Branch(OUT, width)})


def test_state_of_dp_and_dnp_is_not_confused() -> None:
    config = BackboneConfig(d_model=16, n_layer=1, n_head=2, d_ff=32, vocab_size=32)
    dp, dnp = (Backbone(config, scale) for scale in ("dp", "dnp"))
    assert dp.state_dict().keys() == dnp.state_dict().keys()
    for model, other in ((dp, dnp), (dnp, dp)):
        with pytest.raises(ConfigError, match="norm after the matrix"):
            model.load_state_dict(other.state_dict())
        model.load_state_dict(dict(other.state_dict()))  # without the record, as in safetensors
