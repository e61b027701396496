"""What eager mode computes by hand: SwiGLU with the norms before it and RoPE equal the definition;
what is saved."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_sv.nn.ffn import swiglu_outputs
from lightning_sv.nn.rope import rope_tables
from lightning_sv.scale import Output
from lightning_sv.scale.definitions import rotate
from lightning_sv.scale.fast import (
    eager,
    effective_weight,
    grouped_product,
    scaled_product,
    swiglu,
)
from tests.scale.test_branch import leaf
from tests.scale.test_grouped import BLOCKS, inputs_of, rows_of

D = 3
EPS = 1e-2


def finished(z: Tensor, gamma: Tensor | None) -> Tensor:
    y = z / (z.square().mean(-1, keepdim=True) + EPS).sqrt()
    return y if gamma is None else y * gamma


def normed(gate: Tensor, up: Tensor, gamma_gate: Tensor | None, gamma_up: Tensor | None) -> Tensor:
    g = finished(gate, gamma_gate)
    return g / (1 + (-g).exp()) * finished(up, gamma_up)


def weighted(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    return gate / (1 + (-gate).exp()) * up * weight.unsqueeze(-1)


def ours(gate: Tensor, up: Tensor, gamma_gate: Tensor | None, gamma_up: Tensor | None) -> Tensor:
    width = gate.shape[-1]
    return swiglu_outputs(Output(gate, width, EPS, gamma_gate), Output(up, width, EPS, gamma_up))


@pytest.mark.parametrize(("form", "definition", "build"), [
    (ours, normed, lambda: [leaf(2, 5, D), leaf(2, 5, D), leaf(D), leaf(D)]),
    (ours, normed, lambda: [leaf(2, 5, D), leaf(2, 5, D), leaf(D), None]),
    (ours, normed, lambda: [leaf(2, 5, D), leaf(2, 5, D), None, None]),
    (swiglu, weighted, lambda: [leaf(2, 5, D), leaf(2, 5, D), leaf(2, 5)]),
    (swiglu, weighted, lambda: [leaf(2, 5, D), leaf(2, 5, D), leaf(5, 2).detach().T.requires_grad_()]),
])  # fmt: skip
def test_swiglu_and_derivatives_equal_definition(
    form: Callable[..., Tensor],
    definition: Callable[..., Tensor],
    build: Callable[[], list[Tensor | None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        eager.CHUNK_ELEMENTS, "cpu", 4 * D
    )  # ten rows are two pieces and a rest of two
    inputs = build()
    leaves = [t for t in inputs if t is not None]
    values = [form(*inputs), definition(*inputs)]
    torch.testing.assert_close(*values, rtol=1e-12, atol=1e-13)
    weight = torch.randn_like(values[0])
    gradients = [torch.autograd.grad(y, leaves, weight) for y in values]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-13)
    assert torch.autograd.gradgradcheck(form, inputs)


def in_bf16(operation: Callable[..., Tensor], *inputs: Tensor, **settings: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return operation(*inputs, **settings)


EXPERTS = rows_of(BLOCKS["some"])


#: operation, its inputs, and from which number of entries on what it saves must be one of them
@pytest.mark.parametrize(("operation", "inputs", "n_entries"), [
    (scaled_product, [leaf(64, 6), leaf(8, 6), leaf(6), leaf(8)], 1),
    (effective_weight, [leaf(64, 32), leaf(32), leaf(64)], 64 * 32),
    (ours, [leaf(32, 64), leaf(32, 64), leaf(64), leaf(64)], 32 * 64),
    (partial(grouped_product, rows=EXPERTS), inputs_of(EXPERTS, 43, 21, "io", torch.float32), 1),
    (partial(in_bf16, grouped_product, rows=EXPERTS), inputs_of(EXPERTS, 43, 21, "io", torch.float32), 1),
])  # fmt: skip
def test_backward_saves_only_inputs(
    operation: Callable[..., Tensor], inputs: list[Tensor], n_entries: int
) -> None:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        operation(*inputs)
    large = [t for t in saved if t.is_floating_point() and t.numel() >= n_entries]
    known = {t.untyped_storage().data_ptr() for t in inputs}
    assert large and {t.untyped_storage().data_ptr() for t in large} <= known


def test_swiglu_outputs_in_bf16_is_as_accurate_as_plain() -> None:
    gate, up = torch.randn(2, 256, 64).bfloat16()
    gamma = 1 + 0.3 * torch.randn(64)
    leaves = [gate, up, gamma, gamma.clone()]
    weight = torch.randn(256, 64).bfloat16()
    expected = value_and_gradients(normed, [t.double() for t in leaves], weight.double())

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


def test_rotate_equals_complex_product() -> None:
    x = leaf(2, 5, 3, 8)
    tables = rope_tables(5, 8, 100.0, like=x)
    angle = torch.arange(5.0).double()[:, None, None] * 100.0 ** (-torch.arange(4.0).double() / 4)
    pairs = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
    expected = torch.cat((pairs.real, pairs.imag), -1)
    torch.testing.assert_close(rotate(x, tables), expected, rtol=0, atol=1e-14 * math.sqrt(8))
