"""Exact power series, derivatives of students, and flows against closed forms and invariants."""

import sys
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from math import factorial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_sv.errors import ConfigError
from lightning_sv.scale.vector import DirectScale, ExponentialScale, OriginalSpaceScale, ScaleVector
from lightning_sv.theory.flow import flow, loss_ratio, loss_series, power_series, starts_below
from lightning_sv.theory.series import PowerSeries
from lightning_sv.theory.students import STUDENTS, Scaled, preconditioner
from tests.conftest import thinned
from tests.theory.strategies import entries, rational_teachers, states

coefficients = st.lists(entries, min_size=5, max_size=5)


@given(coefficients, coefficients.filter(lambda c: c[0] != 0))
@example([Fraction(k == 3) for k in range(5)], [Fraction(k == 0) for k in range(5)])
@settings(max_examples=40)
def test_series_obey_the_ring_laws(a: list[Fraction], b: list[Fraction]) -> None:
    x = PowerSeries(a)
    y = PowerSeries(b)
    assert (x * y).coefficients == tuple(np.convolve(np.array(a, object), np.array(b, object))[:5])
    assert ((x * y) / y).coefficients == x.coefficients
    assert ((x - y) + y).coefficients == x.coefficients
    assert (y**-2 * y**3).coefficients == y.coefficients
    assert (y * y).sqrt().coefficients in (y.coefficients, (-y).coefficients)
    e = PowerSeries([0, *a[1:]]).exp()
    assert (e * (-PowerSeries([0, *a[1:]])).exp()).coefficients == (1, 0, 0, 0, 0)


def test_series_of_known_functions() -> None:
    assert PowerSeries([0, 1, 0, 0, 0]).exp().coefficients == tuple(
        Fraction(1, factorial(k)) for k in range(5)
    )
    assert (1 - PowerSeries([0, 1, 0])).coefficients == (1, -1, 0)
    wide = PowerSeries([1, Fraction(1, 3**50)]) / np.int64(3)  # numpy's means divide by an int64
    assert wide.coefficients == (Fraction(1, 3), Fraction(1, 3**51))


ORACLES: dict[str, Callable[..., ScaleVector]] = {
    "f": DirectScale,
    "or": OriginalSpaceScale,
    "er": ExponentialScale,
}


@pytest.mark.parametrize("name", thinned(STUDENTS, ("f", "dp", "or")))
@given(data=st.data())
@settings(max_examples=25)
def test_student_gradient_and_preconditioner_equal_autograd(name: str, data: st.DataObject) -> None:
    student = STUDENTS[name]
    blocks, teacher = data.draw(states(student))
    tensors = [torch.tensor(block, requires_grad=True) for block in blocks]

    def effective(*theta: torch.Tensor) -> torch.Tensor:
        if name == "g":
            return theta[0]
        if name == "dp":
            return torch.diag(theta[1]) @ theta[0] @ torch.diag(theta[2])
        if name == "ap":
            return torch.diag(theta[1]) @ theta[0]
        if name == "hg":  # each half of the rows by its own vector
            halves = theta[0].tensor_split(len(theta[1]))
            return torch.cat([half * gamma for half, gamma in zip(halves, theta[1], strict=True)])
        scale = ORACLES[name](teacher.shape[1], "input").double()
        names = [key for key, _ in scale.named_parameters()]
        return theta[0] * torch.func.functional_call(
            scale, dict(zip(names, theta[1:], strict=True)), ()
        )

    a = effective(*tensors)
    loss = 0.5 * (a - torch.tensor(teacher)).square().sum()
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, tensors)])
    np.testing.assert_allclose(student.effective(*blocks), a.detach(), rtol=1e-12)
    np.testing.assert_allclose(
        student.gradient(blocks, teacher), gradient.numpy(), rtol=1e-9, atol=1e-9
    )
    jacobians = torch.autograd.functional.jacobian(effective, tuple(tensors))
    j = torch.cat([part.reshape(teacher.size, -1) for part in jacobians], 1).numpy()
    np.testing.assert_allclose(student.preconditioner(blocks), j @ j.T, rtol=1e-9, atol=1e-9)


def test_scaled_with_a_custom_reparameterization_is_differentiated() -> None:
    """γ = v² in floats and exactly; functions without an exact form in floats only."""
    v = np.array([0.5, -2.0, 3.0])
    assert preconditioner(lambda v: v**2, [v]) == pytest.approx(np.diag(4 * v**2))
    assert preconditioner(np.tanh, [v]) == pytest.approx(np.diag(np.cosh(v) ** -4))
    squared = Scaled("v²", lambda c, d: [np.ones(d)], lambda w, v: w * v**2)
    # g's -8/3, and four times f's -(2/3) 2⁴, because (∂γ/∂v)² = 4
    assert loss_series(squared, [[2]], 3).coefficients == (2, -4, 4, Fraction(-8 - 4 * 32, 3))


TIMES = np.array([0.05, 0.3, 1.0, 2.0])


@given(rational_teachers())
@settings(max_examples=8)
def test_flow_keeps_the_invariants_of_the_proofs(teacher: np.ndarray) -> None:
    total = float((teacher**2).sum())
    assert flow(STUDENTS["g"], teacher, TIMES).loss == pytest.approx(
        0.5 * total * np.exp(-2 * TIMES), rel=1e-9
    )
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
    coefficients: Any = loss_series(STUDENTS[name], teacher, 10).coefficients
    at: Any = Fraction(3, 100)
    value = np.polyval(coefficients[::-1], at)
    assert float(value) == pytest.approx(loss, rel=1e-10)
    w = power_series(STUDENTS[name], teacher, 2)[0]
    assert [x.coefficients[:2] for x in w.flat] == [
        (0, x) for x in np.ravel(teacher)
    ]  # W = t W* + O(t²)


FLOW = sys.modules["lightning_sv.theory.flow"]  # the package has a function with its name
F = STUDENTS["f"]
G = STUDENTS["g"]
OR = STUDENTS["or"]
ROW = [[2, 1]]
W = np.zeros((1, 2))
BLOCKS = [np.ones((1, 2)), np.array([1.0, 2.0])]
#: a small alpha of OR has a large preconditioner, rho = beta^2 d / ||alpha||^2
STIFF = [W, 1e-2 * np.ones(2), np.ones(1)]
WIDE = Scaled("wide", lambda c, d: [], lambda w: np.concatenate([w, w]))
#: a complex step sees no derivative of them
NOT_ANALYTIC = {"norm": lambda a: a / np.linalg.norm(a), "abs": np.abs}


def scaled_by(function: str) -> Scaled:
    scale = NOT_ANALYTIC[function]
    return Scaled("own", lambda c, d: [np.ones(d)], lambda w, alpha: w * scale(alpha))


#: a call, and the start of its error
REFUSED = [
    (partial(flow, F, [1.0, 2.0], [1.0]), "the teacher"),
    (partial(flow, F, [[np.nan, 1.0]], [1.0]), "the flow of 'f'"),
    (partial(flow, F, ROW, [1.0], initial=[np.zeros((2, 1)), np.ones(2)]), "the shapes of initial"),
    (partial(flow, F, ROW, [1.0], initial=[W, np.ones((2, 2))]), "the shapes of initial"),
    (partial(flow, F, ROW, [1.0], initial=[W]), "the shapes of initial"),
    (partial(flow, WIDE, ROW, [1.0]), "the shape of A"),
    (partial(flow, OR, ROW, [0.5], initial=STIFF), "the flow of 'ψ' is too stiff"),
    (partial(flow, scaled_by("norm"), ROW, [0.5]), "the function of the parameters is not analytic"),
    (partial(flow, scaled_by("abs"), ROW, [0.5]), "the function of the parameters is not analytic"),
    (partial(scaled_by("norm").preconditioner, BLOCKS), "the function of the parameters is not analytic"),
    (partial(scaled_by("abs").preconditioner, BLOCKS), "the function of the parameters is not analytic"),
    (partial(loss_ratio, F, G, [[0, 0]]), "the baseline's loss"),
    (partial(loss_ratio, F, G, ROW, [0.0, 1.0]), "the first time"),
    (PowerSeries([2, 1]).sqrt, "the constant term"),
    (PowerSeries([1, 1]).exp, "the constant term"),
]  # fmt: skip


def test_start_of_a_small_teacher_is_decided_by_the_series() -> None:
    """Theorem 2.2 holds, but the integrated losses differ by less than their rounding at first."""
    small = [[0.02]]
    assert starts_below(F, G, small) and not loss_ratio(F, G, small).stays_below_one
    assert loss_ratio(F, G, [[1.0]]).stays_below_one


@pytest.mark.parametrize(("call", "key"), REFUSED)
def test_wrong_students_and_teachers_are_refused(
    call: Callable[[], object], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FLOW, "MOST_EVALUATIONS", 500)  # a stiff flow is refused in less time
    with pytest.raises(ConfigError, match=f"^{key}"):
        call()
