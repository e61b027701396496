"""DP: scale vectors on both sides are faster than one in front."""

from fractions import Fraction

from lightning_sv.theory.claims.base import Claim
from lightning_sv.theory.claims.parts import at_an_instant, early, throughout
from lightning_sv.theory.dual import Array

_SOURCE = "Theorem 3.1 and Theorem D.1"
_START = "W(0) = 0, γ = γa = γb = 1 at t = 0"


def stated_coefficient(teacher: Array) -> Fraction:
    """−(2/3) Σ_i ‖W*_i:‖⁴ (paper, Theorem D.1 (ii)); teacher (c, d) in Fractions."""
    rows = (teacher * teacher).sum(1)
    return Fraction(-2, 3) * Fraction((rows * rows).sum())


CLAIMS = (
    Claim(
        "dp",
        "(i)",
        _SOURCE,
        "dL_φ/dt ≤ dL_f/dt ≤ 0 where γ = γb, W_f = diag(γa) W_φ",
        "on φ's trajectory, or γa_i² ≥ 1 for every i (used in the proof)",
        at_an_instant("dp", "φ"),
    ),
    Claim(
        "dp",
        "(ii)",
        _SOURCE,
        "L_φ − L_f = −(2/3) Σ_i ‖W*_i:‖⁴ t³ + O(t⁴)",
        _START,
        early("dp", "φ", stated_coefficient),
    ),
    Claim(
        "dp",
        "(iii)",
        _SOURCE,
        "L_φ(t) < L_f(t) for every t > 0",
        f"{_START}; the support of W* is a matching",
        throughout("dp", "φ", "matching support", lambda teacher: teacher.matching),
    ),
)
