"""The preconditioner's figures against dense eigenvalues and autograd of the effective matrix."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_sv.curvature import (
    FlowPreconditioner,
    column_eigenvalues,
    eigenvalue_range,
    gamma_figures,
    scale_field,
)
from lightning_sv.curvature.preconditioner import QUANTILES
from lightning_sv.scale import ExponentialScale, OriginalSpaceScale

D_OUT, D_IN = 7, 5
SIDES = [(False, False), (True, False), (False, True), (True, True)]


def branch(has_in: bool, has_out: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    weight = torch.randn(D_OUT, D_IN, dtype=torch.float64)
    gamma_in = 1 + 0.4 * torch.randn(D_IN, dtype=torch.float64) if has_in else None
    gamma_out = 1 + 0.4 * torch.randn(D_OUT, dtype=torch.float64) if has_out else None
    return weight, gamma_in, gamma_out


def effective(weight: Tensor, *gammas: Tensor, has_in: bool, has_out: bool) -> Tensor:
    left = list(gammas)
    a = weight * left.pop(0) if has_in else weight
    return a * left.pop(0).unsqueeze(1) if has_out else a


def jacobian_preconditioner(weight: Tensor, gamma_in: Tensor | None, gamma_out: Tensor | None) -> Tensor:
    """J J^T of (W, v, u) -> diag(u) W diag(v), a dense matrix on the flattened A."""
    sides = {"has_in": gamma_in is not None, "has_out": gamma_out is not None}
    values = tuple(x for x in (weight, gamma_in, gamma_out) if x is not None)
    parts = torch.autograd.functional.jacobian(lambda *x: effective(*x, **sides), values)
    j = torch.cat([p.reshape(D_OUT * D_IN, -1) for p in parts], 1)
    return j @ j.T


@pytest.mark.parametrize(("has_in", "has_out"), SIDES)
def test_flow_preconditioner_and_eigenvalue_range_equal_dense_ones(has_in: bool, has_out: bool) -> None:
    tensors = branch(has_in, has_out)
    dense = jacobian_preconditioner(*tensors)
    product = FlowPreconditioner(*tensors)
    x = torch.randn(D_OUT, D_IN, dtype=torch.float64)
    torch.testing.assert_close(product((x,))[0].flatten(), dense @ x.flatten())
    true = torch.linalg.eigvalsh(dense)
    found = eigenvalue_range(*tensors)
    assert found.largest.value == pytest.approx(true[-1].item(), rel=1e-3)
    assert abs(found.smallest.value - true[0].item()) <= found.smallest.error + 1e-12
    assert (found.smallest.error > 0) == (has_in and has_out)


def test_column_eigenvalues_equal_dense_ones() -> None:
    weight, gamma, _ = branch(True, False)
    low, high = column_eigenvalues(weight, gamma)
    for j in range(D_IN):
        dense = gamma[j] ** 2 * torch.eye(D_OUT) + torch.outer(weight[:, j], weight[:, j])
        true = torch.linalg.eigvalsh(dense.double())
        torch.testing.assert_close(low[j].expand(D_OUT - 1), true[:-1])
        torch.testing.assert_close(high[j], true[-1])
    experts = torch.stack([weight, 2 * weight]), torch.stack([gamma, gamma])
    torch.testing.assert_close(column_eigenvalues(*experts)[1][0], high)


@pytest.mark.parametrize(("has_in", "has_out"), SIDES)
def test_flow_preconditioner_gives_the_step_of_gradient_descent(has_in: bool, has_out: bool) -> None:
    """One small step of gradient descent on W, u and v moves A by -step P(dL/dA)."""
    weight, gamma_in, gamma_out = branch(has_in, has_out)
    sides = {"has_in": has_in, "has_out": has_out}
    x, target = torch.randn(20, D_IN).double(), torch.randn(20, D_OUT).double()
    leaves = [t.clone().requires_grad_() for t in (weight, gamma_in, gamma_out) if t is not None]
    a = effective(*leaves, **sides)
    a.retain_grad()
    (x @ a.T - target).square().mean().backward()
    step = 1e-6
    moved = effective(*(t.detach() - step * t.grad for t in leaves), **sides)
    want = -FlowPreconditioner(weight, gamma_in, gamma_out)((a.grad,))[0]
    torch.testing.assert_close((moved - a.detach()) / step, want, rtol=1e-4, atol=1e-6)


entries = st.lists(st.sampled_from([0.0, 0.5, 1.0, -1.0, 1.37, 2.0, -3.1, 1e-3]), min_size=1, max_size=9)


@settings(max_examples=80)
@given(entries, entries)
def test_scale_field_equals_statistics_of_the_outer_product(u: list[float], v: list[float]) -> None:
    out, into = torch.tensor(u, dtype=torch.float64), torch.tensor(v, dtype=torch.float64)
    field = torch.outer(out, into).abs()
    found = scale_field(into, out)
    assert (found.smallest, found.largest) == (field.min().item(), field.max().item())
    want = np.quantile(field.numpy(), QUANTILES, method="inverted_cdf")
    np.testing.assert_allclose(list(found.quantiles.values()), want, rtol=1e-9, atol=1e-15)
    if found.smallest > 0:
        assert found.spread == pytest.approx(found.largest / found.smallest)
        assert found.log_std == pytest.approx(field.log().std(correction=0).item(), abs=1e-9)
    else:
        assert found.spread == float("inf")


def test_gamma_figures_recover_beta_of_or_and_er() -> None:
    gammas = 0.5 + torch.rand(6)
    original, exponential = OriginalSpaceScale(6, "input"), ExponentialScale(6, "input")
    for vector in (original, exponential):
        vector.set_gamma(gammas)
    assert gamma_figures(original()).rms == pytest.approx(original.beta.item(), rel=1e-6)
    assert gamma_figures(exponential()).geometric_mean == pytest.approx(exponential.beta.exp().item(), rel=1e-6)
    assert gamma_figures(torch.ones(4)) == gamma_figures(torch.ones(9))
    odd = gamma_figures(torch.tensor([1.0, -1.0, 0.001, 2.0]))
    assert (odd.dead, odd.negative) == (0.25, 0.25)
    assert odd.drift == pytest.approx(((4 + 0.999**2 + 1) / 4) ** 0.5)
