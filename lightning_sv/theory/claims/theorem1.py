"""Theorem 1: gradient flow with a scale vector is faster, at every time."""

import numpy as np

from lightning_sv.theory.claims.base import Finding, claim
from lightning_sv.theory.claims.shared_checks import throughout
from lightning_sv.theory.flow import TIMES, flow
from lightning_sv.theory.students import STUDENTS, TEACHERS

_SOURCE = "Theorem 2.2 and Appendix C.1"
_F = STUDENTS["f"]
_G = STUDENTS["g"]
_SETTING = "W(0) = 0, γ(0) = 1, W* ≠ 0"


@claim("theorem1", _SOURCE, "faster", _SETTING)
def _faster() -> Finding:
    """L_f(t) < L_g(t) for every t > 0."""
    return throughout("f", "g", "f, with γ, is always below g, without")


@claim("theorem1", _SOURCE, "invariant", _SETTING)
def _invariant() -> Finding:
    """γ_j² − ‖w_j‖² = 1."""
    worst = 0.0
    for teacher in TEACHERS:
        for w, gamma in flow(_F, teacher.matrix, TIMES).states:
            worst = max(worst, float(np.abs(gamma**2 - (w**2).sum(0) - 1).max()))
    note = "the integrator does not know the invariant"
    return Finding(1.0, 1.0 + worst, worst, worst < 1e-9, note)


@claim("theorem1", "Appendix C.1, Step I", "L_g", "W(0) = 0")
def _plain_loss() -> Finding:
    """L_g(t) = ½ e⁻²ᵗ ‖W*‖_F²."""
    worst = 0.0
    times = TIMES[TIMES <= 5]
    for teacher in TEACHERS:
        stated = 0.5 * float((teacher.matrix**2).sum()) * np.exp(-2 * times)
        integrated = flow(_G, teacher.matrix, times).loss
        worst = max(worst, float(np.abs(integrated / stated - 1).max()))
    note = f"largest relative error of {len(TEACHERS)} teachers up to t = 5"
    return Finding(0.0, worst, worst, worst < 1e-8, note)


@claim("theorem1", "Section 2.1", "preconditioner", "any state")
def _preconditioner() -> Finding:
    """ȧ_j = P_j (w*_j − a_j), P_j = γ_j² I + w_j w_jᵀ."""
    rng = np.random.default_rng(0)
    worst = 0.0
    for _ in range(200):
        c, d = rng.integers(1, 5, 2)
        w = rng.standard_normal((c, d))
        gamma = rng.standard_normal(d)
        stated = np.zeros((c, d, c, d))
        for j in range(d):
            stated[:, j, :, j] = gamma[j] ** 2 * np.eye(c) + np.outer(w[:, j], w[:, j])
        errors = np.abs(_F.preconditioner([w, gamma]) - stated.reshape(c * d, c * d))
        worst = max(worst, float(errors.max()))
    note = "J Jᵀ by differentiation against the formula, 200 random states"
    return Finding(0.0, worst, worst, worst < 1e-12, note)
