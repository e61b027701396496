"""The claims: on drawn teachers and states, at their limits, and able to fail."""

import math
import sys
from collections.abc import Callable
from fractions import Fraction
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_sv.theory.claims import (
    CLAIMS,
    deep_linear,
    descent,
    placement,
    reparameterization,
)
from lightning_sv.theory.claims.base import Result
from lightning_sv.theory.claims.deep_linear import DeepLinear, balanced
from lightning_sv.theory.claims.shared_checks import PAIRINGS, Rates, State
from lightning_sv.theory.flow import difference_series, flow, loss_ratio, starts_below
from lightning_sv.theory.students import STUDENTS, Student
from tests.conftest import thinned
from tests.theory.strategies import balanced_teachers, matchings, rational_teachers, states

F = STUDENTS["f"]
#: formulas against differentiation in random states, in a second
QUICK = ["P", "K", "Hessian", "overhead", "expansion", "4 isotropic", "5 as printed", "equivalence"]


@pytest.mark.parametrize(
    "claim", [c for c in CLAIMS if c.part in QUICK], ids=lambda c: f"{c.claim} {c.part}"
)
def test_quick_claim_is_as_expected(claim) -> None:  # type: ignore[no-untyped-def]
    assert Result(claim, claim.check()).verdict in ("holds", "fails, as expected")


@pytest.mark.long
@given(rational_teachers())
@settings(max_examples=25)
def test_difference_series_of_every_design_has_the_stated_coefficient(teacher: np.ndarray) -> None:
    """Claim (ii) in exact rationals; ER equals OR, because its P is the same at γ = 1."""
    for name, stated in (
        ("dp", placement.dp_coefficient),
        ("ap", placement.ap_coefficient),
        ("hg", placement.hg_coefficient),
        ("or", reparameterization.or_coefficient),
        ("er", reparameterization.or_coefficient),
    ):
        assert difference_series(STUDENTS[name], F, teacher, 3) == (0, 0, 0, stated(teacher))
    assert placement.hg_coefficient(teacher) >= 0


@pytest.mark.parametrize("name", PAIRINGS)
@given(data=st.data())
@settings(max_examples=60)
def test_rates_of_guarded_states_do_not_violate(name: str, data: st.DataObject) -> None:
    """Claim (i) holds if γa² ≥ 1 or ρ ≥ 1."""
    pairing = PAIRINGS[name]
    blocks, teacher = data.draw(states(pairing.student))
    ours = pairing.student.effective(*blocks)
    theirs = F.effective(*pairing.standard(blocks))
    np.testing.assert_allclose(ours, theirs, atol=1e-12)
    if pairing.guard(blocks) < 1:  # scale the guarded vector (γa, or β) up to the guard
        k = {"dp": 1, "or": 2}[name]
        blocks[k] = blocks[k] / math.sqrt(pairing.guard(blocks)) * (1 + 1e-12)
    rates = pairing.rates([State(blocks, teacher)])
    assert not rates.violated.any() and (rates.standard <= 0).all()


def stays_below(student: Student, baseline: Student, teacher: np.ndarray) -> bool:
    """Claim (iii): exact just after t = 0, and integrated afterwards."""
    ratio = loss_ratio(student, baseline, teacher)
    return starts_below(student, baseline, teacher) and ratio.stays_below_one


UNDER = [
    ("dp", "f", matchings()),
    ("or", "f", balanced_teachers()),
    ("f", "g", rational_teachers()),
]


@pytest.mark.parametrize(("student", "other", "teachers"), thinned(UNDER, UNDER[:1], several=True))
@given(data=st.data())
@settings(max_examples=6)
def test_stays_below_under_its_condition_is_true(
    student: str, other: str, teachers: st.SearchStrategy, data: st.DataObject
) -> None:
    """Placement needs a matching, reparameterization balanced columns; Theorem 1 holds for any
    teacher."""
    teacher = data.draw(teachers)
    assert stays_below(STUDENTS[student], STUDENTS[other], teacher)
    assert not stays_below(STUDENTS[other], STUDENTS[student], teacher)
    assert not stays_below(F, F, teacher)


def test_rates_violate_above_the_standard_model_and_above_zero() -> None:
    rates = Rates(np.ones(4), np.array([-1.0, -2, -2, 1]), np.array([-2.0, -1, -2, 0.5]))
    assert rates.violated.tolist() == [True, False, False, True]


@given(st.floats(0.1, 3), st.floats(-9, 9))
def test_hessian_is_a_covariance_between_the_product_and_three_times_it(
    gamma: float, target: float
) -> None:
    """docs/theory.md: ∇²L of ½(γw − a*)² is positive semidefinite iff a* is in [γw, 3γw]."""
    point = descent.Point(np.array([1.5, gamma]), np.array([target]))
    product = 1.5 * gamma
    smallest = np.linalg.eigvalsh(point.hessian)[0]
    assume(abs(smallest) > 1e-9)
    assert (smallest > 0) == (product < target < 3 * product)


def test_loss_ratio_beyond_the_conditions_exceeds_one() -> None:
    """DP (iii) fails at (2, 1)ᵀ, OR (iii) at (8, 1); their neighbours hold."""
    late = np.linspace(0.02, 4, 100)
    crossing = loss_ratio(STUDENTS["dp"], F, [[2], [1]], np.linspace(2.9, 3.1, 2001)).first_above(1)
    assert loss_ratio(STUDENTS["dp"], F, [[2], [1]], late).first_above(1) == pytest.approx(
        crossing, abs=1e-3
    )
    assert loss_ratio(STUDENTS["dp"], F, [[2], [0]], late).stays_below_one
    behind = loss_ratio(STUDENTS["or"], F, [[8, 1]], np.linspace(0.02, 1, 99))
    assert behind.exceeds_one and behind.largest == pytest.approx(1.09, abs=0.01)
    assert behind.time_of_largest == pytest.approx(0.48, abs=0.02)
    assert loss_ratio(STUDENTS["or"], F, [[7, 1]], np.linspace(0.02, 1, 99)).stays_below_one


def test_deep_linear_flow_stays_balanced() -> None:
    a, teacher = np.random.default_rng(0).standard_normal((2, 2, 3))
    outer, inner = balanced(a)
    np.testing.assert_allclose(outer @ inner, a, atol=1e-12)
    outer, inner = flow(DeepLinear(), teacher, [1.0]).states[0]
    np.testing.assert_allclose(outer.T @ outer, inner @ inner.T, atol=1e-9)


Change = Callable[[Any], Any]
FLOW = sys.modules["lightning_sv.theory.flow"]  # the package has a function with its name


class WideDeepLinear(DeepLinear):
    """A DLN whose layers have max(c, d) hidden units: the same as min(c, d) if c = d."""

    def initial(self, c: int, d: int) -> list[np.ndarray]:
        wide = max(c, d)
        return [np.eye(c, wide, dtype=int), np.eye(wide, d, dtype=int)]


def times(factor: float | Fraction) -> Change:
    """Return a change of a formula that multiplies its values."""
    return lambda formula: lambda *args: factor * formula(*args)


def at_one(_: object) -> Callable[..., np.ndarray]:
    """Return OR's P for ER, which is right at γ = 1 alone."""
    return lambda alpha, beta: np.eye(alpha.size)


#: claim and part, a name in the module that it is checked by, and the change of that name
WRONG = [
    ("or", "P", reparameterization, "stated_preconditioner", times(1 + 1e-6)),
    ("er", "P", reparameterization, "stated_exponential", times(1 + 1e-6)),
    ("dln", "K", deep_linear, "balanced_preconditioner", times(1 + 1e-6)),
    ("descent", "4 isotropic", descent, "noise_term", times(1 + 1e-6)),
    ("descent", "expansion", descent, "noise_term", times(2)),
    ("or", "(ii)", reparameterization, "or_coefficient", times(1 + Fraction(1, 10**9))),  # series are exact
    ("table1", "J Jᵀ", reparameterization, "stated_exponential", at_one),
    ("dln", "overhead", deep_linear, "DeepLinear", lambda _: WideDeepLinear),  # for c ≠ d too
    ("limits", "Theorem 1", FLOW, "RATIO_ERROR", lambda _: 1e9),  # no ratio of losses counts as above 1
]  # fmt: skip


@pytest.mark.parametrize(("claim", "part", "module", "name", "change"), WRONG)
def test_claim_with_wrong_formula_is_contradicted(
    claim: str,
    part: str,
    module: ModuleType,
    name: str,
    change: Change,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, name, change(getattr(module, name)))
    (found,) = (one for one in CLAIMS if (one.claim, one.part) == (claim, part))
    assert Result(found, found.check()).verdict == "CONTRADICTED"
