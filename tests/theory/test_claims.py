"""The claims: on drawn teachers and states, at their limits, and able to fail."""

import math
from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sv.theory.claims import CLAIMS, heterogeneity, placement, reparameterization, weight_decay
from lightning_sv.theory.claims.base import Finding
from lightning_sv.theory.claims.shared_checks import PAIRINGS, State, early
from lightning_sv.theory.flow import difference_series, loss_ratio, stays_below
from lightning_sv.theory.students import STUDENTS
from tests.conftest import thinned
from tests.theory.strategies import balanced, matchings, rational_teachers, states

F = STUDENTS["f"]


@pytest.mark.long
@given(rational_teachers())
@settings(max_examples=25)
def test_cubic_coefficient_of_every_design_equals_the_stated_one(teacher: np.ndarray) -> None:
    """Claim (ii) in exact rationals; ER equals OR, because its P is the same at γ = 1."""
    for name, stated in (
        ("dp", placement.stated_coefficient),
        ("ap", placement.after_coefficient),
        ("hg", heterogeneity.stated_coefficient),
        ("or", reparameterization.stated_coefficient),
        ("er", reparameterization.stated_coefficient),
    ):
        assert difference_series(STUDENTS[name], F, teacher, 3) == (0, 0, 0, stated(teacher))


@pytest.mark.parametrize("name", PAIRINGS)
@given(data=st.data())
@settings(max_examples=60)
def test_pairing_of_guarded_states_never_violates(name: str, data: st.DataObject) -> None:
    """Claim (i) holds if γa² ≥ 1 or ρ ≥ 1."""
    pairing = PAIRINGS[name]
    blocks, teacher = data.draw(states(pairing.student))
    ours, theirs = pairing.student.effective(*blocks), F.effective(*pairing.standard(blocks))
    np.testing.assert_allclose(ours, theirs, atol=1e-12)
    if pairing.guard(blocks) < 1:  # scale the guarded vector (γa, or β) up to the guard
        k = {"dp": 1, "or": 2}[name]
        blocks[k] = blocks[k] / math.sqrt(pairing.guard(blocks)) * (1 + 1e-12)
    rates = pairing.rates(State(blocks, teacher))
    assert not rates.violates and rates.standard <= 0


@given(data=st.data())
@settings(max_examples=40)
def test_dp_difference_of_rates_equals_the_proof(data: st.DataObject) -> None:
    """DP: Σ (γa_i² − 1) γb_j² R_ij² + Σ ⟨A_i, R_i⟩² / γa_i² (Appendix D.1, claim (i))."""
    pairing = PAIRINGS["dp"]
    (w, a, b), teacher = data.draw(states(pairing.student))
    effective = a[:, None] * w * b
    residual = teacher - effective
    stated = (((a**2 - 1)[:, None] * b**2 * residual**2).sum()) + (((effective * residual).sum(1) / a) ** 2).sum()
    rates = pairing.rates(State([w, a, b], teacher))
    assert rates.standard - rates.student == pytest.approx(stated, rel=1e-9, abs=1e-8)


UNDER = [("dp", "f", matchings()), ("or", "f", balanced()), ("f", "g", rational_teachers())]


@pytest.mark.parametrize(
    ("student", "other", "teachers"),
    thinned(UNDER, UNDER[:1], several=True),
)
@given(data=st.data())
@settings(max_examples=6)
def test_student_under_its_condition_stays_below(
    student: str, other: str, teachers: st.SearchStrategy, data: st.DataObject
) -> None:
    """Placement needs a matching, reparameterization balanced columns; Theorem 1 holds for any teacher."""
    assert stays_below(STUDENTS[student], STUDENTS[other], data.draw(teachers))[0]


def test_loss_ratio_beyond_the_conditions_exceeds_one() -> None:
    """DP (iii) fails at (2, 1)ᵀ, OR (iii) at (8, 1); their neighbours hold."""
    late = np.linspace(0.02, 4, 100)
    assert loss_ratio(STUDENTS["dp"], F, [[2], [1]], late).first_above(1) == pytest.approx(3.0, abs=0.06)
    assert loss_ratio(STUDENTS["dp"], F, [[2], [0]], late).peak[0] < 1
    peak, at = loss_ratio(STUDENTS["or"], F, [[8, 1]], np.linspace(0.02, 1, 99)).peak
    assert peak == pytest.approx(1.09, abs=0.01) and at == pytest.approx(0.48, abs=0.02)
    assert loss_ratio(STUDENTS["or"], F, [[7, 1]], np.linspace(0.02, 1, 99)).peak[0] < 1


@pytest.mark.parametrize("name", PAIRINGS)
def test_smallest_violation_is_outside_the_guard(name: str) -> None:
    """By hand: γa = 1/2 with W = 0 is 4 times slower."""
    pairing = PAIRINGS[name]
    found = pairing.smallest_violation(*((1, 1) if name == "dp" else (1, 2)), (0.0, 0.5, 1.0))
    assert found is not None
    (blocks, teacher), rates = found
    assert rates.violates and pairing.guard(blocks) < 1
    if name == "dp":
        assert [block.tolist() for block in blocks] == [[[0.0]], [0.5], [1.0]] and teacher.tolist() == [[0.5]]
        assert rates.student == pytest.approx(rates.standard / 4)
    assert pairing.smallest_violation(1, 1, (1.0,)) is None


def test_claim_with_wrong_statement_is_contradicted() -> None:
    """A coefficient that is off by 1e-5 does not pass, nor does a limit that holds."""
    claim = next(c for c in CLAIMS if (c.claim, c.part) == ("or", "(ii)"))
    stated = reparameterization.stated_coefficient
    wrong = partial(early, "or", lambda teacher: stated(teacher) + Fraction(1, 100_000))
    result = replace(claim, check=wrong).run()
    assert result.verdict == "CONTRADICTED" and result.finding.error == pytest.approx(1e-5)
    limit = replace(claim, check=lambda: Finding("< 1", 0.5, None, True), expected="fails")
    assert limit.run().verdict == "CONTRADICTED"
    assert replace(claim, check=lambda: Finding("< 1", 2.0, None, False), expected="fails").run().verdict == (
        "fails, as expected"
    )


def test_growth_equals_resampling() -> None:
    rng = np.random.default_rng(0)
    early_, noise = rng.gamma(4, 1, 4000), rng.normal(0, 1, 4000)
    ratio, error = weight_decay.growth(2 * early_ + noise, early_)
    picks = rng.integers(0, 4000, (400, 4000))
    resampled = (2 * early_ + noise)[picks].mean(1) / early_[picks].mean(1)
    assert ratio == pytest.approx(2, abs=4 * error) and error == pytest.approx(resampled.std(), rel=0.15)
