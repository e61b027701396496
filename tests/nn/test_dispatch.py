"""Dispatch and combination against plain indexing, over random routings."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from lightning_sv.nn.dispatch import Layout, combine, dispatch, layout, weights_by_row
from lightning_sv.nn.ffn import swiglu
from lightning_sv.scale import eager
from lightning_sv.scale.grouped import grouped_product
from tests.tolerances import assert_near


@st.composite
def routings(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Ids with all tokens on one expert, idle experts, ids named twice, and fewer choices than experts."""
    n_expert, k, n = draw(st.integers(1, 9)), draw(st.integers(1, 4)), draw(st.integers(1, 40))
    busy = draw(st.lists(st.integers(0, n_expert - 1), min_size=1, max_size=n_expert))
    flat = draw(st.lists(st.sampled_from(busy), min_size=n * k, max_size=n * k))
    return torch.tensor(flat).view(n, k), n_expert


def plain_combine(y: Tensor, weights: Tensor, made: Layout) -> Tensor:
    return torch.einsum("nk,nkd->nd", weights, y[made.position])


@given(routings())
def test_dispatch_and_combine_equal_plain_indexing(routing: tuple[Tensor, int]) -> None:
    experts, n_expert = routing
    made = layout(experts, n_expert)
    x = torch.randn(len(experts), 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(len(made.source), 3, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(experts.shape, dtype=torch.float64, requires_grad=True)
    padded = torch.cat([x, torch.zeros(1, 3)])[made.source]
    ones = torch.ones_like(weights)
    pairs = [
        (dispatch(x, made), padded, [x]),
        (combine(y, made), plain_combine(y, ones, made), [y]),
        (combine(y * weights_by_row(weights, made).unsqueeze(-1), made), plain_combine(y, weights, made), [y, weights]),
        (weights_by_row(weights, made)[made.position], weights, [weights]),
    ]
    for ours, theirs, leaves in pairs:
        torch.testing.assert_close(ours, theirs)
        grad = torch.randn_like(theirs)
        torch.testing.assert_close(torch.autograd.grad(ours, leaves, grad), torch.autograd.grad(theirs, leaves, grad))


def test_dispatch_combine_and_swiglu_pass_gradgradcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(eager.CHUNK_ELEMENTS, "cpu", 6)  # several pieces, the last one short
    made = layout(torch.tensor([[0, 2], [2, 3], [0, 3]]), 4)

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    rows = len(made.source)
    for function, tensors in (
        (lambda x: dispatch(x, made), (make(3, 2),)),
        (lambda y: combine(y, made), (make(rows, 2),)),
        (lambda w: weights_by_row(w, made), (make(3, 2),)),
        (swiglu, (make(5, 3), make(5, 3), make(5))),
    ):
        assert torch.autograd.gradgradcheck(function, tensors)


def block(x: Tensor, router: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    weights, experts = (x @ router.mT).softmax(-1).topk(2)
    made = layout(experts, len(gate))
    rows = dispatch(x, made)
    opened, filled = (grouped_product(rows, weight, None, None, made.rows) for weight in (gate, up))
    hidden = swiglu(opened, filled, weights_by_row(weights, made))
    return combine(grouped_product(hidden, down, None, None, made.rows), made)


@pytest.mark.parametrize(("n", "compiled"), [(3, False), (60, False), pytest.param(60, True, marks=pytest.mark.long)])
def test_expert_block_equals_every_expert_on_every_token(n: int, compiled: bool) -> None:
    """The kernels run in float32, the oracle in float64."""
    leaves = [torch.randn(*s, requires_grad=True) for s in [(n, 24), (6, 24), (6, 21, 24), (6, 21, 24), (6, 24, 21)]]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    x, router, gate, up, down = exact
    weights, experts = (x @ router.mT).softmax(-1).topk(2)
    dense = torch.zeros(n, 6, dtype=torch.float64).scatter(1, experts, weights)
    hidden = F.silu(torch.einsum("nd,efd->nef", x, gate)) * torch.einsum("nd,efd->nef", x, up)
    theirs = torch.einsum("ne,nef,edf->nd", dense, hidden, down)
    ours = (torch.compile(block, fullgraph=True) if compiled else block)(*leaves)
    terms = 24 + 24 + 6 + 21 + 2  # router, branches, softmax, down, two experts
    assert_near(ours, theirs, terms)
    found, expected = (torch.autograd.grad(y.square().sum(), of) for y, of in ((ours, leaves), (theirs, exact)))
    for a, b in zip(found, expected, strict=True):
        assert_near(a, b, 2 * terms + n)
