"""OR and ER: separate magnitude and direction are faster than γ itself."""

from fractions import Fraction
from functools import partial

import numpy as np

from lightning_sv.theory.claims.base import Advance, Claim, Finding
from lightning_sv.theory.claims.shared_checks import at_an_instant, early, throughout
from lightning_sv.theory.dual import Array
from lightning_sv.theory.students import Exponential, OriginalSpace

_SOURCE = "Theorem 3.2 and Theorem D.2"
_START = "W(0) = 0, γ = 1, α = 1, β = 1 at t = 0"


def stated_coefficient(teacher: Array) -> Fraction:
    """Return −(2/3)(1 − 1/d) ‖W*‖_F⁴ (paper, Theorem D.2 (ii)); teacher (c, d) in Fractions."""
    square = Fraction((teacher * teacher).sum())
    return Fraction(-2, 3) * (1 - Fraction(1, teacher.shape[1])) * square * square


def stated_preconditioner(alpha: Array, beta: Array) -> Array:
    """Return P = d ĝĝᵀ + ρ (I − ĝĝᵀ), ĝ = γ/‖γ‖, ρ = β²d/‖α‖² (paper, Section 3.3); α (d,), β (1,) -> (d, d)."""
    d = alpha.size
    gamma = OriginalSpace().gamma(alpha, beta)
    along = np.outer(gamma, gamma) / (gamma @ gamma)
    rho = beta[0] ** 2 * d / (alpha @ alpha)
    return np.asarray(d * along + rho * (np.eye(d) - along))


def stated_exponential(alpha: Array, beta: Array) -> Array:
    """Return P = diag(γ²) + (1 − 1/d) γγᵀ, from ∂γ/∂α = diag(γ)(I − 11ᵀ/d), ∂γ/∂β = γ; α (d,), β (1,) -> (d, d).

    The paper has no formula (Table 1: "multiplicative/log-space scale metric").
    """
    gamma = Exponential().gamma(alpha, beta)
    return np.asarray(np.diag(gamma**2) + (1 - 1 / alpha.size) * np.outer(gamma, gamma))


def _exponential(advance: Advance) -> Finding:
    rng = np.random.default_rng(0)
    worst, along = 0.0, 0.0
    for _ in range(300):
        d = int(rng.integers(1, 7))
        alpha, beta = rng.standard_normal(d), rng.standard_normal(1)
        ours, stated = Exponential().gamma_preconditioner(alpha, beta), stated_exponential(alpha, beta)
        worst = max(worst, float(np.abs(ours - stated).max() / np.abs(ours).max()))
        start = Exponential().gamma_preconditioner(np.zeros(d), np.zeros(1))
        along = max(along, float(np.abs(start - stated_preconditioner(np.ones(d), np.ones(1))).max()))
    note = f"J Jᵀ by differentiation, 300 random states; at γ = 1 it is OR's P ({along:.0e}): d along γ, 1 across"
    return Finding(0.0, worst, worst, max(worst, along) < 1e-12, note)


def _preconditioner(advance: Advance) -> Finding:
    rng = np.random.default_rng(0)
    worst = 0.0
    for _ in range(300):
        # α away from 0, where Norm has no derivative
        alpha = rng.standard_normal(rng.integers(1, 7))
        alpha *= rng.uniform(0.5, 2) / np.linalg.norm(alpha)
        beta = rng.standard_normal(1)
        ours = OriginalSpace().gamma_preconditioner(alpha, beta)
        worst = max(worst, float(np.abs(ours - stated_preconditioner(alpha, beta)).max()))
    note = "J Jᵀ by differentiation of β·Norm(α) against the formula, 300 random states"
    return Finding(0.0, worst, worst, worst < 1e-10, note)


CLAIMS = (
    Claim(
        "or",
        "(i)",
        _SOURCE,
        "dL_ψ/dt ≤ dL_f/dt ≤ 0 where W_f = W_ψ, γ = β Norm(α)",
        "on ψ's trajectory, or ρ = β²d/‖α‖² ≥ 1 (used in the proof)",
        partial(at_an_instant, "or", "ψ"),
    ),
    Claim(
        "or",
        "(ii)",
        _SOURCE,
        "L_ψ − L_f = −(2/3)(1 − 1/d) ‖W*‖_F⁴ t³ + O(t⁴)",
        _START,
        partial(early, "or", "ψ", stated_coefficient),
    ),
    Claim(
        "or",
        "(iii)",
        _SOURCE,
        "L_ψ(t) < L_f(t) for every t > 0",
        f"{_START}; d > 1, columns of W* of equal positive norm",
        partial(throughout, "or", "ψ", "balanced columns", lambda teacher: teacher.balanced, ("f", "f")),
    ),
    Claim("or", "P", "Section 3.3", "γ̇ = −P ∇L, P = d ĝĝᵀ + ρ (I − ĝĝᵀ)", "α ≠ 0, β ≠ 0", _preconditioner),
    Claim(
        "er",
        "P",
        "Table 1; the formula is ours",
        "γ̇ = −P ∇L, P = diag(γ²) + (1 − 1/d) γγᵀ",
        "any state",
        _exponential,
    ),
    Claim(
        "er",
        "(ii)",
        "ours, as Theorem D.2 (ii)",
        "L_ER − L_f = −(2/3)(1 − 1/d) ‖W*‖_F⁴ t³ + O(t⁴): to this order ER is OR",
        "W(0) = 0, γ = 1, α = 0, β = 0 at t = 0",
        partial(early, "er", "ER", stated_coefficient),
    ),
)
