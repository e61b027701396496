"""Flows against closed forms, invariants and their own power series."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from scipy.integrate import solve_ivp

from lightning_sv.errors import ConfigError
from lightning_sv.theory.flow import flow, loss_series, power_series
from lightning_sv.theory.students import STUDENTS, Scaled
from tests.conftest import thinned
from tests.theory.strategies import rational_teachers

TIMES = np.array([0.05, 0.3, 1.0, 2.0])


@given(rational_teachers())
@settings(max_examples=8)
def test_flow_keeps_the_invariants_of_the_proofs(teacher: np.ndarray) -> None:
    total = float((teacher**2).sum())
    assert flow(STUDENTS["g"], teacher, TIMES).loss == pytest.approx(0.5 * total * np.exp(-2 * TIMES), rel=1e-9)
    for w, gamma in flow(STUDENTS["f"], teacher, TIMES).states:
        assert gamma**2 - (w**2).sum(0) == pytest.approx(np.ones_like(gamma), abs=1e-9)
    for w, a, b in flow(STUDENTS["dp"], teacher, TIMES).states:
        assert a**2 - (w**2).sum(1) == pytest.approx(np.ones_like(a), abs=1e-9)
        assert b**2 - (w**2).sum(0) == pytest.approx(np.ones_like(b), abs=1e-9)
    for w, alpha, beta in flow(STUDENTS["or"], teacher, TIMES).states:
        assert beta**2 - (w**2).sum() == pytest.approx(1, abs=1e-9)
        assert alpha @ alpha == pytest.approx(alpha.size, abs=1e-9)


@pytest.mark.parametrize("name", thinned(STUDENTS, ("f", "dp", "or")))
def test_power_series_of_a_student_equals_the_integrator(name: str) -> None:
    """Order 10 at t = 0.03; the remainder is of order t^11."""
    teacher = [[1, 0.5, -2], [0, 1.5, 1]]
    loss = flow(STUDENTS[name], teacher, [0.03]).loss[0]
    coefficients = loss_series(STUDENTS[name], teacher, 10).coefficients
    assert float(np.polyval(coefficients[::-1], Fraction(3, 100))) == pytest.approx(loss, rel=1e-10)  # type: ignore[call-overload]
    w = power_series(STUDENTS[name], teacher, 2)[0]
    assert [x.coefficients[:2] for x in w.flat] == [(0, x) for x in np.ravel(teacher)]  # W = t W* + O(t²)


def double_speed(a: float) -> float:
    """1 + 4m² + 3m⁴ where m is the real root of m (1 + m²) = a, with γa = γb = √(1 + m²)."""
    m = next(root.real for root in np.roots([1, 0, 1, -a]) if abs(root.imag) < 1e-9)
    return 1 + 4 * m**2 + 3 * m**4


@pytest.mark.parametrize(("name", "speed"), [("f", lambda a: np.sqrt(1 + 4 * a * a)), ("dp", double_speed)])
def test_flow_of_scalars_equals_the_reduction_of_the_proof(name: str, speed) -> None:  # type: ignore[no-untyped-def]
    """c = d = 1: ȧ = q(a)(w* − a) (Appendix D.1, claim (iii))."""
    w = 1.5
    a = solve_ivp(lambda _, a: [speed(a[0]) * (w - a[0])], (0, 2), [0.0], rtol=1e-10, atol=1e-12).y[0, -1]
    assert flow(STUDENTS[name], [[w]], [2.0]).loss[0] == pytest.approx(0.5 * (w - a) ** 2, rel=1e-6)


def test_flow_of_a_student_that_is_not_analytic_is_refused() -> None:
    """A complex step sees no derivative of the norm."""
    student = Scaled("norm", lambda c, d: [np.ones(d)], lambda w, alpha: w * alpha / np.linalg.norm(alpha))
    with pytest.raises(ConfigError, match="not analytic"):
        flow(student, [[2, 1]], [0.5])


def test_flow_wrong_teacher_is_refused() -> None:
    with pytest.raises(ValueError, match="the teacher is"):
        flow(STUDENTS["f"], [1.0, 2.0], [1.0])
