"""AP and DP: a scale vector behind the matrix mirrors one in front; both together are faster than one in front."""

from fractions import Fraction

import numpy as np

from lightning_sv.theory.claims.base import Finding, Line, claim, ratio_panel
from lightning_sv.theory.claims.shared_checks import at_an_instant, early, throughout
from lightning_sv.theory.flow import FLOOR, TIMES, flow, loss_ratio, loss_series
from lightning_sv.theory.series import Array
from lightning_sv.theory.students import STUDENTS, TEACHERS, Teacher

_F, _AP = STUDENTS["f"], STUDENTS["ap"]
_SOURCE = "Theorem 3.1 and Theorem D.1"
_START = "W(0) = 0, γ = γa = γb = 1 at t = 0"


def stated_coefficient(teacher: Array) -> Fraction:
    """Return −(2/3) Σ_i ‖W*_i:‖⁴ (paper, Theorem D.1 (ii)); teacher (c, d) in Fractions."""
    rows = (teacher * teacher).sum(1)
    return Fraction(-2, 3) * Fraction((rows * rows).sum())


def after_coefficient(teacher: Array) -> Fraction:
    """Return −(2/3)(Σ_i ‖W*_i:‖⁴ − Σ_j ‖w*_j‖⁴), DP's rows minus f's columns; teacher in Fractions."""
    return stated_coefficient(teacher) - stated_coefficient(teacher.T)


@claim("ap", "Section 3.2; ours", "mirror", "W(0) = 0, γa = 1 at t = 0")
def _mirror() -> Finding:
    """L_AP(t) for W* is L_f(t) for W*ᵀ: AP is f with rows and columns exchanged."""
    exact, worst = True, 0.0
    times = TIMES[TIMES <= 4]
    for teacher in TEACHERS:
        mirrored = loss_series(_F, teacher.matrix.T, 5)
        exact = exact and loss_series(_AP, teacher.matrix, 5).coefficients == mirrored.coefficients
        ours, theirs = flow(_AP, teacher.matrix, times).loss, flow(_F, teacher.matrix.T, times).loss
        alive = theirs > FLOOR * theirs[0] * 1e4
        worst = max(worst, float(np.abs(ours[alive] / theirs[alive] - 1).max()))
    note = f"{len(TEACHERS)} teachers: equal series to t⁵ exactly, integrated losses up to t = 4 within the error"
    return Finding(1.0, 1.0 + worst, worst, exact and worst < 1e-6, note)


@claim("ap", "ours, as Theorem D.1 (ii)", "(ii)", "W(0) = 0, γ = γa = 1 at t = 0")
def _after_early() -> Finding:
    """L_AP − L_f = −(2/3)(Σ_i ‖W*_i:‖⁴ − Σ_j ‖w*_j‖⁴) t³ + O(t⁴)."""
    return early("ap", after_coefficient)


def _lines(axis: int) -> list[Teacher]:
    """Return the teachers with one row (axis 0) or one column (axis 1) of two or more entries."""
    return [t for t in TEACHERS if t.matrix.shape[axis] == 1 and (t.matrix != 0).sum() > 1]


@claim("ap", "ours", "(iii) one row", "c = 1, two entries of W* are not 0")
def _one_row() -> Finding:
    """L_AP(t) < L_f(t) for every t > 0: rate √(1 + 4‖a‖²) against √(1 + 4a_j²)."""
    return throughout("ap", "f", "(iii) AP stays below f: one row", _lines(0))


@claim("ap", "ours", "(iii) column", "d = 1, two entries of W* are not 0")
def _one_column() -> Finding:
    """L_f(t) < L_AP(t) for every t > 0."""
    return throughout("f", "ap", "(iii) f stays below AP: one column", _lines(1))


@claim(
    "ap",
    'Section 3.2: AP "may better match output-side anisotropy"',
    "any teacher",
    "W(0) = 0, γ = γa = 1; the table of teachers",
    expected="fails",
)
def _ahead_for_any_teacher() -> Finding:
    """L_AP(t) < L_f(t) for every t > 0 and any W*."""
    curves = [(teacher, loss_ratio(_AP, _F, teacher.matrix, TIMES[TIMES < 5])) for teacher in TEACHERS]
    # equal curves differ by rounding
    behind = [teacher for teacher, curve in curves if curve.peak[0] > 1 + 1e-3]
    overtaken = [teacher.name for teacher in behind if after_coefficient(teacher.matrix) < 0]
    lines = [Line(teacher.name, *curve) for teacher, curve in curves if after_coefficient(teacher.matrix)][:6]
    panel = ratio_panel("AP against f: which side is better is the teacher's", "AP", "f", lines, (1e-3, 1e3))
    ratio = max(curve.peak[0] for _, curve in curves)
    note = (
        f"behind at some time for {len(behind)} of {len(TEACHERS)} teachers; ahead early and overtaken later, as in "
        f"the paper's Figure 5, for {len(overtaken)}: {', '.join(overtaken) or 'none'}"
    )
    return Finding("< 1", ratio, None, not behind, note, (panel,))


@claim("dp", _SOURCE, "(i)", "on φ's trajectory, or γa_i² ≥ 1 for every i (used in the proof)")
def _at_an_instant() -> Finding:
    """dL_φ/dt ≤ dL_f/dt ≤ 0 where γ = γb, W_f = diag(γa) W_φ."""
    return at_an_instant("dp")


@claim("dp", _SOURCE, "(ii)", _START)
def _early() -> Finding:
    """L_φ − L_f = −(2/3) Σ_i ‖W*_i:‖⁴ t³ + O(t⁴)."""
    return early("dp", stated_coefficient)


@claim("dp", _SOURCE, "(iii)", f"{_START}; the support of W* is a matching")
def _throughout() -> Finding:
    """L_φ(t) < L_f(t) for every t > 0."""
    teachers = [teacher for teacher in TEACHERS if teacher.matching]
    return throughout("dp", "f", "(iii) φ stays below f: matching support", teachers)
