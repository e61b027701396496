"""What eager mode computes by hand, SwiGLU with the norms before it and RoPE: equal to the
definition."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_sv.nn.ffn import swiglu_outputs
from lightning_sv.nn.rope import rope_tables
from lightning_sv.scale import Output
from lightning_sv.scale.fast import eager, rotate
from tests.scale.test_branch import leaf, saved_for_backward

D = 3
EPS = 1e-2


def finished(z: Tensor, gamma: Tensor | None) -> Tensor:
    y = z / (z.square().mean(-1, keepdim=True) + EPS).sqrt()
    return y if gamma is None else y * gamma


def definition(
    gate: Tensor, up: Tensor, gamma_gate: Tensor | None, gamma_up: Tensor | None
) -> Tensor:
    g = finished(gate, gamma_gate)
    return g / (1 + (-g).exp()) * finished(up, gamma_up)


def ours(gate: Tensor, up: Tensor, gamma_gate: Tensor | None, gamma_up: Tensor | None) -> Tensor:
    width = gate.shape[-1]
    return swiglu_outputs(Output(gate, width, EPS, gamma_gate), Output(up, width, EPS, gamma_up))


@pytest.mark.parametrize("scaled", [(True, True), (True, False), (False, False)])
def test_swiglu_and_derivatives_equal_definition(
    scaled: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        eager.CHUNK_ELEMENTS, "cpu", 4 * D
    )  # ten rows are two pieces and a rest of two
    inputs = [leaf(2, 5, D), leaf(2, 5, D), *(leaf(D) if one else None for one in scaled)]
    leaves = [t for t in inputs if t is not None]
    values = [form(*inputs) for form in (ours, definition)]
    torch.testing.assert_close(*values, rtol=1e-12, atol=1e-13)
    weight = torch.randn_like(values[0])
    gradients = [torch.autograd.grad(y, leaves, weight) for y in values]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-13)
    assert torch.autograd.gradgradcheck(ours, inputs)


def test_swiglu_outputs_in_bf16_is_as_accurate_as_plain() -> None:
    gate, up = torch.randn(2, 256, 64).bfloat16()
    gamma = 1 + 0.3 * torch.randn(64)
    leaves = [gate, up, gamma, gamma.clone()]
    weight = torch.randn(256, 64).bfloat16()
    expected = value_and_gradients(definition, [t.double() for t in leaves], weight.double())

    def plain_form(g: Tensor, u: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return F.silu(Output(g, 64, EPS, a).finish()) * Output(u, 64, EPS, b).finish()

    fast = value_and_gradients(ours, leaves, weight)
    plain = value_and_gradients(plain_form, leaves, weight)
    for one, other, exact, leaf_ in zip(fast, plain, expected, [weight, *leaves], strict=True):
        assert one.dtype == leaf_.dtype
        error, plain_error = (torch.norm(t - exact) / exact.norm() for t in (one, other))
        assert error <= 1.1 * plain_error < 0.02


def value_and_gradients(
    form: Callable[..., Tensor], inputs: Sequence[Tensor], weight: Tensor
) -> list[Tensor]:
    """Return form(*inputs), and the gradients of its sum with these weights."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    value = form(*leaves)
    return [value, *torch.autograd.grad(value, leaves, weight)]


def test_swiglu_outputs_backward_saves_only_its_inputs() -> None:
    gate = leaf(32, 64)
    up = leaf(32, 64)
    gamma = leaf(64)
    saved = saved_for_backward(lambda: ours(gate, up, gamma, gamma))
    large = {t.untyped_storage().data_ptr() for t in saved if t.numel() >= gate.numel()}
    assert large == {gate.data_ptr(), up.data_ptr()}


def test_rotate_equals_complex_product_and_passes_gradcheck() -> None:
    x = leaf(2, 5, 3, 8)
    tables = rope_tables(5, 8, 100.0, like=x)
    angle = torch.arange(5.0).double()[:, None, None] * 100.0 ** (-torch.arange(4.0).double() / 4)
    pairs = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
    expected = torch.cat((pairs.real, pairs.imag), -1)
    torch.testing.assert_close(rotate(x, tables), expected, rtol=0, atol=1e-14 * math.sqrt(8))
    assert torch.autograd.gradcheck(lambda x: rotate(x, tables), x)
    assert torch.autograd.gradgradcheck(lambda x: rotate(x, tables), x)
    with torch.no_grad():
        torch.testing.assert_close(rotate(x, tables), expected)
