"""Triton kernels under Triton's interpreter against the plain forms.

Run by tests/nn/test_kernels.py in a process of its own: the interpreter is chosen when triton is imported.
"""

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_sv import Backbone, BackboneConfig, ScaleOptions
from lightning_sv.curvature import twice_differentiable
from lightning_sv.nn.kernels import gate_up, heads
from lightning_sv.nn.kernels.select import use_kernels
from lightning_sv.nn.rope import rope_tables, rotate
from lightning_sv.scale.norm import normalize

EPS = 1e-5
#: of a value rounded to bf16, one unit in its last place: the interpreter cuts digits off where a GPU rounds
BF16 = 2**-7
Function = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens make several programs, the last of them with rows to spare."""
    monkeypatch.setattr(heads, "STEPS", 2)
    monkeypatch.setattr(gate_up, "PROGRAMS", 3)


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).detach().norm() / wanted.double().detach().norm())


def check(kernel: Function, plain: Function, inputs: list[Tensor], dtype: torch.dtype, bound: float) -> None:
    """Compare values and gradients with those of the plain form in float64, at the very inputs of the kernel.

    Args:
        kernel: of the inputs, in `dtype`; scale vectors, which are inputs of one or two axes, in float32 or wider
        plain: the same function
        inputs: in float64
        dtype: of the activations
        bound: on the relative error of each, norm-wise
    """
    wide = torch.promote_types(dtype, torch.float32)
    given = [t.to(wide if t.dim() <= 2 else dtype).requires_grad_() for t in inputs]
    exact = [t.detach().double().requires_grad_() for t in given]
    y, z = kernel(*given), plain(*exact)
    weight = torch.randn_like(z).to(dtype)
    assert y.dtype == dtype and relative(y, z) < bound
    pairs = zip(
        torch.autograd.grad(y, given, weight), torch.autograd.grad(z, exact, weight.double()), given, strict=True
    )
    for found, wanted, of in pairs:
        assert found.dtype == of.dtype and relative(found, wanted) < bound


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, BF16)])
@pytest.mark.parametrize(("width", "rotates"), [(8, False), (12, True)])
def test_norm_rotate_and_gradients_equal_plain(dtype: torch.dtype, bound: float, width: int, rotates: bool) -> None:
    torch.manual_seed(width)
    x, gamma = (t.double() for t in (torch.randn(2, 41, 3, width), 1 + 0.5 * torch.randn(3, width)))
    exact = rope_tables(41, width, 10_000.0, x) if rotates else None
    tables = rope_tables(41, width, 10_000.0, x.to(dtype)) if rotates else None

    def plain(x: Tensor, gamma: Tensor) -> Tensor:
        y = normalize(x, EPS, gamma)
        return y if exact is None else rotate(y, exact)

    check(lambda x, gamma: heads.norm_rotate(x, gamma, EPS, tables), plain, [x, gamma], dtype, bound)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, BF16)])
@pytest.mark.parametrize("width", [16, 21])
def test_normed_swiglu_equals_plain_form_with_gradients(dtype: torch.dtype, bound: float, width: int) -> None:
    torch.manual_seed(width)
    gate, up = torch.randn(2, 2, 4, width).double()
    gammas = [1 + 0.5 * torch.randn(width).double() for _ in range(2)]

    def plain(gate: Tensor, up: Tensor, gamma_gate: Tensor, gamma_up: Tensor) -> Tensor:
        return F.silu(normalize(gate, EPS, gamma_gate)) * normalize(up, EPS, gamma_up)

    def kernel(gate: Tensor, up: Tensor, gamma_gate: Tensor, gamma_up: Tensor) -> Tensor:
        apart = F.pad(gate, (0, 3))[..., :width]  # rows further apart than they are wide, as the compiler lays them
        return gate_up.normed_swiglu(apart, up, gamma_gate, gamma_up, EPS)

    check(kernel, plain, [gate, up, *gammas], dtype, bound)


def test_normed_swiglu_strided_gradient_equals_plain_form() -> None:
    """One gradient is strided in its last axis, one is expanded."""
    gate, up = (torch.randn(4, 21, dtype=torch.float64, requires_grad=True) for _ in range(2))
    y = gate_up.normed_swiglu(gate, up, None, None, EPS)
    plain = F.silu(normalize(gate, EPS)) * normalize(up, EPS)
    for grad in (torch.randn(4, 42, dtype=torch.float64)[:, ::2], torch.ones((), dtype=torch.float64).expand(4, 21)):
        found, wanted = (torch.autograd.grad(z, (gate, up), grad, retain_graph=True) for z in (y, plain))
        assert all(relative(one, two) < 1e-13 for one, two in zip(found, wanted, strict=True))


SMALL = BackboneConfig(d_model=16, n_layer=1, n_head=2, vocab_size=24)
CASES = {
    "unified": (SMALL, "unified", ScaleOptions()),
    "no vectors after the norms": (SMALL, "hg+dnp", ScaleOptions(placement_at={"up_proj": "np", "k_proj": "np"})),
    "some branches": (SMALL, "hg+dnp+er", ScaleOptions(placement_at={"gate_proj": "dp", "q_proj": "dp"})),
    "shared between heads": (SMALL, "hg+dnp", ScaleOptions(share_heads=["q_proj", "k_proj"])),
    "grouped": (replace(SMALL, d_model=32, n_head=4, n_kv_head=2), "unified", ScaleOptions()),
    "gemma": (replace(SMALL, qk_norm=True, post_norm=True), "hg+or", ScaleOptions()),
    "gemma without vectors": (replace(SMALL, qk_norm=True), "nop", ScaleOptions()),
    "llama": (SMALL, "llama", ScaleOptions()),
}


@pytest.mark.parametrize("case", CASES)
def test_model_with_kernels_has_equal_loss_gradients_and_hessian_products(case: str) -> None:
    torch.manual_seed(0)
    config, scale, options = CASES[case]
    model = Backbone(config, scale, options).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.rand_like(parameter))
    parameters = list(model.parameters())
    probes = [torch.randn_like(p) for p in parameters]
    tokens = torch.randint(0, config.vocab_size, (2, 6))

    def results() -> list[Tensor]:
        loss = model(tokens[:, :-1], targets=tokens[:, 1:])
        first = torch.autograd.grad(loss, parameters)
        with twice_differentiable():
            again = torch.autograd.grad(model(tokens[:, :-1], targets=tokens[:, 1:]), parameters, create_graph=True)
            slope = sum((g * p).sum() for g, p in zip(again, probes, strict=True))
            second = torch.autograd.grad(slope, parameters)
        return [loss, torch.cat([g.flatten() for g in first]), torch.cat([g.flatten() for g in second])]

    wanted = results()
    use_kernels(model, "triton")
    attention = model.layers[0].attn
    attention.norm_rotate = kernel = Mock(wraps=attention.norm_rotate)
    for found, expected in zip(results(), wanted, strict=True):
        assert relative(found, expected) < 1e-11
    assert kernel.called == (case != "llama")


def test_model_with_kernels_compiled_has_equal_gradients() -> None:
    model = Backbone(SMALL, "unified")
    use_kernels(model, "triton")
    tokens = torch.randint(0, SMALL.vocab_size, (2, 6))

    def gradients(forward: Callable[..., Tensor]) -> Tensor:
        loss = forward(tokens[:, :-1], targets=tokens[:, 1:])
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    wanted = gradients(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    assert relative(gradients(compiled), wanted) < 1e-5
