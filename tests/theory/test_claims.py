"""The claims: on drawn teachers and states, at their limits, and able to fail."""

import math
import sys
from dataclasses import replace
from fractions import Fraction
from functools import partial
from types import ModuleType

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
from lightning_sv.theory.claims.base import Finding, Result
from lightning_sv.theory.claims.deep_linear import DeepLinear, balanced
from lightning_sv.theory.claims.shared_checks import PAIRINGS, Rates, State, early
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


def test_limit_without_a_counterexample_is_contradicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """No ratio of losses counts as above 1."""
    module = sys.modules["lightning_sv.theory.flow"]  # the package has a function with its name
    monkeypatch.setattr(module, "RATIO_ERROR", 1e9)
    (claim,) = [one for one in CLAIMS if (one.claim, one.part) == ("limits", "Theorem 1")]
    assert Result(claim, claim.check()).verdict == "CONTRADICTED"


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


#: claim and part, a formula that it checks, and a relative error of that formula
WRONG = [
    ("or", "P", reparameterization, "stated_preconditioner", 1e-6),
    ("er", "P", reparameterization, "stated_exponential", 1e-6),
    ("dln", "K", deep_linear, "balanced_preconditioner", 1e-6),
    ("descent", "4 isotropic", descent, "noise_term", 1e-6),
    ("descent", "expansion", descent, "noise_term", 1.0),
]


@pytest.mark.parametrize(("name", "part", "module", "formula", "error"), WRONG)
def test_claim_with_wrong_formula_is_contradicted(
    name: str,
    part: str,
    module: ModuleType,
    formula: str,
    error: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = getattr(module, formula)
    monkeypatch.setattr(module, formula, lambda *args: (1 + error) * right(*args))
    (claim,) = (claim for claim in CLAIMS if (claim.claim, claim.part) == (name, part))
    assert Result(claim, claim.check()).verdict == "CONTRADICTED"


def test_claim_with_wrong_statement_is_contradicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coefficient that is off by 1e-9 does not pass, because series are exact, nor OR's P for ER,
    which is right at γ = 1 alone."""
    claims = {(claim.claim, claim.part): claim for claim in CLAIMS}
    claim = claims["or", "(ii)"]
    stated = reparameterization.or_coefficient
    wrong = partial(early, "or", lambda teacher: stated(teacher) + Fraction(1, 10**9))
    result = Result(claim, wrong())
    assert result.verdict == "CONTRADICTED" and result.finding.error == pytest.approx(1e-9)
    monkeypatch.setattr(
        reparameterization, "stated_exponential", lambda alpha, beta: np.eye(alpha.size)
    )
    exponential = claims["table1", "J Jᵀ"]
    assert Result(exponential, exponential.check()).verdict == "CONTRADICTED"
    for agrees, verdict in ((True, "CONTRADICTED"), (False, "fails, as expected")):
        limit = replace(
            claim, check=lambda agrees=agrees: Finding("< 1", 0.5, None, agrees), expected="fails"
        )
        assert Result(limit, limit.check()).verdict == verdict


class WideDeepLinear(DeepLinear):
    """A DLN whose layers have max(c, d) hidden units: the same as min(c, d) if c = d."""

    def initial(self, c: int, d: int) -> list[np.ndarray]:
        wide = max(c, d)
        return [np.eye(c, wide, dtype=int), np.eye(wide, d, dtype=int)]


def test_overhead_of_a_wide_hidden_layer_is_contradicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """c·m + m·d parameters with m = min(c, d) are counted for c ≠ d too."""
    (claim,) = (claim for claim in CLAIMS if (claim.claim, claim.part) == ("dln", "overhead"))
    monkeypatch.setattr(deep_linear, "DeepLinear", WideDeepLinear)
    assert Result(claim, claim.check()).verdict == "CONTRADICTED"
