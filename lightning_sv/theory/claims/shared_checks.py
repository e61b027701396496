"""Checks shared by the theorems of several students: (ii) early, (iii) throughout."""

from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from lightning_sv.theory.claims.base import Finding
from lightning_sv.theory.dual import Array
from lightning_sv.theory.flow import FLOOR, TIMES, difference_series, flow, stays_below
from lightning_sv.theory.panels import TIME, Line, Panel, ratio_panel
from lightning_sv.theory.students import STUDENTS, exact
from lightning_sv.theory.teachers import TEACHERS, Teacher

_F = STUDENTS["f"]
#: above this time, the next terms of the series exceed the first
FIT_UNTIL = 0.08


def rational_teachers(count: int, seed: int = 0) -> list[Array]:
    """Return random teachers with entries k/4, c and d from 1 to 3."""
    rng = np.random.default_rng(seed)
    teachers: list[Array] = []
    while len(teachers) < count:
        whole = rng.integers(-8, 9, rng.integers(1, 4, 2))
        if whole.any():
            teachers.append(exact(whole) / 4)
    return teachers


def difference(name: str, teacher: Array, times: Array) -> Array:
    """Return L_student(t) − L_f(t) of integrated flows."""
    return flow(STUDENTS[name], teacher, times).loss - flow(_F, teacher, times).loss


def ode_fit(name: str, teacher: Array) -> float:
    """Fit the coefficient of t³ in L_student − L_f to integrated flows below `FIT_UNTIL`, without series."""
    times = np.linspace(0.004, FIT_UNTIL, 40)
    powers = np.stack([(times / FIT_UNTIL) ** k for k in range(3, 10)], axis=-1)
    solution = np.linalg.lstsq(powers, difference(name, teacher, times), rcond=None)[0]
    return float(solution[0] / FIT_UNTIL**3)


def early(name: str, stated: Callable[[Array], Fraction]) -> Finding:
    """Check (ii): the coefficient of t³ from exact power series equals the paper's formula.

    Args:
        name: name of the student
        stated: the paper's coefficient for a teacher in Fractions
    """
    student = STUDENTS[name]
    matrices = [*(teacher.matrix for teacher in TEACHERS), *rational_teachers(12)]
    errors, lower = [], True
    for matrix in matrices:
        series = difference_series(student, _F, matrix, 3)
        lower = lower and not any(series[:3])
        errors.append(abs(series[3] - stated(matrix)))
    shown = next(teacher for teacher in TEACHERS if teacher.name == "full 2×3").matrix
    series = difference_series(student, _F, shown, 4)
    relative = abs(ode_fit(name, shown) / float(series[3]) - 1)
    times = np.geomspace(0.01, 0.5, 60)
    lines = [
        Line(teacher.name, times, difference(name, teacher.matrix, times) / (float(stated(teacher.matrix)) * times**3))
        for teacher in [teacher for teacher in TEACHERS if stated(teacher.matrix)][:5]
    ]
    panel = Panel(
        "(ii) Early on they differ by the stated t³ term",
        TIME,
        f"$(L_{{{student.name}}} - L_f)$ / (stated coefficient · t³)",
        lines,
        scale="x",
        level=1.0,
        limits=(0, 1.15),
    )
    note = (
        f"exact in all of {len(matrices)} teachers, shown for 2×3; the fit of the integrated flows below "
        f"t = {FIT_UNTIL} is off by {relative:.0e}; t⁴ / t³ = {float(series[4] / series[3]):.2f}"
    )
    worst = float(max(errors))
    agrees = worst <= 1e-6 and lower and relative < 1e-4
    return Finding(float(stated(shown)), float(series[3]), worst, agrees, note, (panel,))


def throughout(name: str, behind: str, title: str, teachers: Sequence[Teacher] = TEACHERS) -> Finding:
    """Check (iii): the ratio of losses stays below 1.

    Args:
        name: name of the student
        behind: name of the student that is slower
        title: title of the picture
        teachers: teachers that satisfy the condition
    """
    student, baseline = STUDENTS[name], STUDENTS[behind]
    below, curves = zip(*(stays_below(student, baseline, teacher.matrix) for teacher in teachers), strict=True)
    lines = [Line(teacher.name, *curve) for teacher, curve in zip(teachers, curves, strict=True)][:6]
    panel = ratio_panel(title, student.name, baseline.name, lines, (1e-6, 3))
    note = (
        f"{len(teachers)} teachers; just after t = 0 by exact series, then until t = {TIMES[-1]:g} or "
        f"L_{baseline.name} is {FLOOR:g} of ½‖W*‖², whichever comes first"
    )
    return Finding("< 1", max(curve.peak[0] for curve in curves), None, all(below), note, (panel,))
