"""Eigenvalues, traces and norms against dense matrices, and their errors against the stated ones."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_sv.curvature import Estimate, HessianProduct, hutchinson, lanczos
from tests.conftest import thinned
from tests.curvature.oracle import CASES, Dense, case

CASE_ROWS = thinned(CASES, [row for row in CASES if row[0] == "hg+dnp+or"], several=True)


def with_eigenvalues(values: list[float], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    n = len(values)
    q = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator)).Q
    return q @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ q.T


@pytest.mark.parametrize(("strategy", "subset"), CASE_ROWS)
def test_lanczos_subset_of_llama_equals_dense_eigenvalue(strategy: str, subset: str) -> None:
    c = case(strategy)
    matrix = c.dense(c.subset(subset))
    product, true = Dense(matrix, c.subset(subset)), torch.linalg.eigvalsh(matrix)
    assert lanczos(product, 60).value == pytest.approx(true[-1].item(), rel=1e-3)
    one_percent = lanczos(product, rtol=1e-2)
    assert one_percent.value == pytest.approx(true[-1].item(), rel=1e-2)
    assert one_percent.n_matvecs <= 30
    assert one_percent.value <= true[-1] * (1 + 1e-9) and (true - one_percent.value).abs().min() <= one_percent.error
    assert lanczos(product, 100, rtol=0).value == pytest.approx(true[-1].item(), rel=1e-6)


values = st.lists(st.floats(-1e3, 1e3).map(lambda x: round(x, 3)), min_size=1, max_size=12)


@settings(max_examples=60)
@given(values, st.integers(1, 14), st.integers(0, 3))
def test_lanczos_error_contains_an_eigenvalue(eigenvalues: list[float], n_steps: int, seed: int) -> None:
    product = Dense(with_eigenvalues(eigenvalues, seed))
    found = lanczos(product, n_steps, rtol=0)
    top = max(map(abs, eigenvalues))
    assert min(abs(found.value - x) for x in eigenvalues) <= found.error + 1e-12 * top
    assert found.n_matvecs == product.products <= min(n_steps, len(eigenvalues))
    if n_steps >= len(eigenvalues):
        assert found.value == pytest.approx(max(eigenvalues), abs=1e-9 * top)
        assert found.error <= 1e-6 * top
    assert found.value <= max(eigenvalues) + 1e-9 * top


def test_lanczos_stops_at_its_tolerance() -> None:
    spread = Dense(with_eigenvalues([100.0, -30.0, *torch.linspace(-1, 1, 298).tolist()]))
    loose = lanczos(spread, rtol=1e-2)
    assert loose.n_matvecs < 10 and loose.error <= 1
    assert lanczos(spread, rtol=0).n_matvecs == 30
    assert lanczos(Dense(torch.eye(40, dtype=torch.float64))).n_matvecs == 1  # an invariant subspace
    zero = lanczos(Dense(torch.zeros(5, 5, dtype=torch.float64)))
    assert (zero.value, zero.n_matvecs) == (0, 1)


def test_hutchinson_is_unbiased_with_errors_of_its_scatter() -> None:
    matrix = with_eigenvalues([(-1) ** i * 3.0 / (1 + i) for i in range(50)])
    true = (matrix.trace().item(), matrix.square().sum().item())
    runs = [hutchinson(Dense(matrix), 30, generator=torch.Generator().manual_seed(s)) for s in range(400)]
    for k, name in enumerate(("trace", "squared_frobenius")):
        estimates: list[Estimate] = [getattr(run, name) for run in runs]
        found = torch.tensor([e.value for e in estimates])
        scatter = found.std().item()
        assert abs(found.mean().item() - true[k]) < 3 * scatter / 20  # unbiased
        said = torch.tensor([e.error for e in estimates]).square().mean().sqrt().item()
        assert said == pytest.approx(scatter, rel=0.15)


def test_estimates_with_equal_generator_repeat() -> None:
    product = Dense(with_eigenvalues([float(i) for i in range(20)]))
    assert hutchinson(product, 5) == hutchinson(product, 5)
    other = torch.Generator().manual_seed(1)
    assert hutchinson(product, 5) != hutchinson(product, 5, generator=other)
    assert lanczos(product, 4) == lanczos(product, 4)
    assert lanczos(product, 4) != lanczos(product, 4, generator=other)


def test_estimates_of_too_few_products_refused() -> None:
    product = Dense(torch.eye(3))
    for run, message in (
        (lambda: lanczos(product, 0), "n_steps of lanczos is 0"),
        (lambda: hutchinson(product, 1), "at least 2"),
    ):
        with pytest.raises(ValueError, match=message):
            run()


def test_estimates_of_nonfinite_products_are_nan() -> None:
    theta = torch.ones(4, requires_grad=True)
    product = HessianProduct(lambda: (theta.square() * float("nan")).sum(), [theta])
    moments = hutchinson(product, 4)
    for found in (moments.trace, moments.squared_frobenius):
        assert math.isnan(found.value) and math.isnan(found.error) and found.n_matvecs > 0
    assert math.isnan(lanczos(product, 4).value)
