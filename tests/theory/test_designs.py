"""Table 1 and the deep linear network: preconditioners and flows against closed forms."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sv.theory.claims import CLAIMS, heterogeneity, reparameterization
from lightning_sv.theory.claims.deep_linear import (
    DeepLinear,
    balanced,
    balanced_preconditioner,
    end_rates,
    singular_value,
)
from lightning_sv.theory.flow import flow, loss_series, starts_below
from lightning_sv.theory.students import STUDENTS
from tests.theory.strategies import rational_teachers


def test_table_1_with_a_wrong_row_is_contradicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """ER with OR's P, which is right at γ = 1 alone."""
    monkeypatch.setattr(reparameterization, "stated_exponential", lambda alpha, beta: np.eye(alpha.size))
    (claim,) = (claim for claim in CLAIMS if claim.claim == "table1")
    assert claim.run().verdict == "CONTRADICTED"


@given(rational_teachers())
@settings(max_examples=15)
def test_ap_equals_f_of_the_transpose_and_hg_starts_no_lower(teacher: np.ndarray) -> None:
    assert loss_series(STUDENTS["ap"], teacher, 4).coefficients == loss_series(STUDENTS["f"], teacher.T, 4).coefficients
    assert not starts_below(STUDENTS["hg"], STUDENTS["f"], teacher)
    assert heterogeneity.stated_coefficient(teacher) >= 0


@given(st.integers(0, 1000), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=20)
def test_deep_linear_preconditioner_and_balance_equal_closed_forms(seed: int, c: int, d: int) -> None:
    rng = np.random.default_rng(seed)
    a, teacher = rng.standard_normal((2, c, d))
    outer, inner = balanced(a)
    np.testing.assert_allclose(outer @ inner, a, atol=1e-12)
    np.testing.assert_allclose(outer.T @ outer, inner @ inner.T, atol=1e-12)
    np.testing.assert_allclose(DeepLinear().preconditioner([outer, inner]), balanced_preconditioner(a), atol=1e-12)
    outer, inner = flow(DeepLinear(), teacher, [1.0]).states[0]
    np.testing.assert_allclose(outer.T @ outer, inner @ inner.T, atol=1e-9)  # the flow conserves the difference


def test_deep_linear_flow_is_logistic_and_ends_as_stated() -> None:
    """Scalars: the logistic; at the end residuals shrink with 2σ, behind f's √(1 + 4σ²) however large σ is."""
    times = np.linspace(0.1, 4, 20)
    (run,) = [flow(DeepLinear(0.1), [[1.5]], times)]
    s = np.array([float((outer @ inner)[0, 0]) for outer, inner in run.states])
    assert s == pytest.approx(singular_value(times, 1.5, 0.01), rel=1e-9)
    assert -DeepLinear().rate(run.states[-1], np.array([[1.5]])) / (2 * run.loss[-1]) == pytest.approx(3, rel=1e-3)
    assert end_rates([[1.5]]) == pytest.approx((10**0.5, 3))
    assert end_rates([[3, 3, 3, 3]])[1] > end_rates([[3, 3, 3, 3]])[0]
