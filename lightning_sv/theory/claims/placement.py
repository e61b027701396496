"""AP and DP: a scale vector behind the matrix mirrors one in front; both together are faster than one in front."""

from fractions import Fraction
from functools import partial

import numpy as np

from lightning_sv.theory.claims.base import Advance, Claim, Finding, counted
from lightning_sv.theory.claims.shared_checks import at_an_instant, early, throughout
from lightning_sv.theory.compare import FLOOR, TIMES, loss_ratio
from lightning_sv.theory.dual import Array
from lightning_sv.theory.flow import flow, loss_series
from lightning_sv.theory.panels import Line, ratio_panel
from lightning_sv.theory.students import STUDENTS
from lightning_sv.theory.teachers import TEACHERS, Teacher

_SOURCE = "Theorem 3.1 and Theorem D.1"
_START = "W(0) = 0, γ = γa = γb = 1 at t = 0"


def stated_coefficient(teacher: Array) -> Fraction:
    """Return −(2/3) Σ_i ‖W*_i:‖⁴ (paper, Theorem D.1 (ii)); teacher (c, d) in Fractions."""
    rows = (teacher * teacher).sum(1)
    return Fraction(-2, 3) * Fraction((rows * rows).sum())


def after_coefficient(teacher: Array) -> Fraction:
    """Return −(2/3)(Σ_i ‖W*_i:‖⁴ − Σ_j ‖w*_j‖⁴), DP's rows minus f's columns; teacher in Fractions."""
    return stated_coefficient(teacher) - stated_coefficient(teacher.T)


def _mirror(advance: Advance) -> Finding:
    exact, worst = True, 0.0
    times = TIMES[TIMES <= 4]
    for teacher in counted(TEACHERS, advance):
        mirrored = loss_series(STUDENTS["f"], teacher.matrix.T, 5)
        exact = exact and loss_series(STUDENTS["ap"], teacher.matrix, 5).coefficients == mirrored.coefficients
        ours = flow(STUDENTS["ap"], teacher.matrix, times).loss
        theirs = flow(STUDENTS["f"], teacher.matrix.T, times).loss
        alive = theirs > FLOOR * theirs[0] * 1e4
        worst = max(worst, float(np.abs(ours[alive] / theirs[alive] - 1).max()))
    note = f"{len(TEACHERS)} teachers: equal series to t⁵ exactly, integrated losses up to t = 4 within the error"
    return Finding(1.0, 1.0 + worst, worst, exact and worst < 1e-6, note)


def _ahead_for_any_teacher(advance: Advance) -> Finding:
    curves = [
        (teacher, loss_ratio(STUDENTS["ap"], STUDENTS["f"], teacher.matrix, TIMES[TIMES < 5]))
        for teacher in counted(TEACHERS, advance)
    ]
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


def _line(teacher: Teacher, axis: int) -> bool:
    """Return True if the teacher is one row (axis 0) or one column (axis 1) of two or more entries."""
    return teacher.matrix.shape[axis] == 1 and int((teacher.matrix != 0).sum()) > 1


CLAIMS = (
    Claim(
        "ap",
        "mirror",
        "Section 3.2; ours",
        "L_AP(t) for W* is L_f(t) for W*ᵀ: AP is f with rows and columns exchanged",
        "W(0) = 0, γa = 1 at t = 0",
        _mirror,
    ),
    Claim(
        "ap",
        "(ii)",
        "ours, as Theorem D.1 (ii)",
        "L_AP − L_f = −(2/3)(Σ_i ‖W*_i:‖⁴ − Σ_j ‖w*_j‖⁴) t³ + O(t⁴)",
        "W(0) = 0, γ = γa = 1 at t = 0",
        partial(early, "ap", "AP", after_coefficient),
    ),
    Claim(
        "ap",
        "(iii) one row",
        "ours",
        "L_AP(t) < L_f(t) for every t > 0: rate √(1 + 4‖a‖²) against √(1 + 4a_j²)",
        "c = 1, two entries of W* are not 0",
        partial(throughout, "ap", "AP", "one row", lambda teacher: _line(teacher, 0), ("f", "f")),
    ),
    Claim(
        "ap",
        "(iii) column",
        "ours",
        "L_f(t) < L_AP(t) for every t > 0",
        "d = 1, two entries of W* are not 0",
        partial(throughout, "f", "f", "one column", lambda teacher: _line(teacher, 1), ("ap", "AP")),
    ),
    Claim(
        "ap",
        "any teacher",
        'Section 3.2: AP "may better match output-side anisotropy"',
        "L_AP(t) < L_f(t) for every t > 0 and any W*",
        "W(0) = 0, γ = γa = 1; the table of teachers",
        _ahead_for_any_teacher,
        expected="fails",
    ),
    Claim(
        "dp",
        "(i)",
        _SOURCE,
        "dL_φ/dt ≤ dL_f/dt ≤ 0 where γ = γb, W_f = diag(γa) W_φ",
        "on φ's trajectory, or γa_i² ≥ 1 for every i (used in the proof)",
        partial(at_an_instant, "dp", "φ"),
    ),
    Claim(
        "dp",
        "(ii)",
        _SOURCE,
        "L_φ − L_f = −(2/3) Σ_i ‖W*_i:‖⁴ t³ + O(t⁴)",
        _START,
        partial(early, "dp", "φ", stated_coefficient),
    ),
    Claim(
        "dp",
        "(iii)",
        _SOURCE,
        "L_φ(t) < L_f(t) for every t > 0",
        f"{_START}; the support of W* is a matching",
        partial(throughout, "dp", "φ", "matching support", lambda teacher: teacher.matching, ("f", "f")),
    ),
)
