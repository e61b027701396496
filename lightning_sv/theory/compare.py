"""Comparison of two students on one teacher: loss ratio along their flows, and exact first difference."""

from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from lightning_sv.theory.dual import Array
from lightning_sv.theory.flow import flow, loss_series
from lightning_sv.theory.students import Student

#: times from which the difference, of order t³, exceeds the integrator's error, until losses are rounding errors
TIMES = np.concatenate([np.geomspace(0.01, 0.5, 25), np.linspace(0.52, 8, 188)])

#: fraction of the initial loss below which a residual is within the integrator's error
FLOOR = 1e-14

#: rounding error of a loss ratio
MARGIN = 1e-9


class Curve(NamedTuple):
    """A quantity as a function of the flow's time."""

    times: Array
    values: Array

    @property
    def peak(self) -> tuple[float, float]:
        """Largest value and its time."""
        k = int(self.values.argmax())
        return float(self.values[k]), float(self.times[k])

    def first_above(self, level: float) -> float:
        """Return the first time at which the value exceeds `level`; infinite if it never does."""
        above = self.values > level
        return float(self.times[above.argmax()]) if above.any() else float("inf")


def loss_ratio(
    student: Student,
    baseline: Student,
    teacher: Any,
    times: Array = TIMES,
    *,
    initial: tuple[list[Array] | None, list[Array] | None] = (None, None),
) -> Curve:
    """Return L_student(t) / L_baseline(t), while the baseline's loss is above rounding.

    Args:
        student: student of the numerator
        baseline: student of the denominator
        teacher: W*, shape (c, d)
        times: increasing, > 0
        initial: parameters of both at t = 0; None for their own
    """
    ours = flow(student, teacher, times, initial=initial[0]).loss
    theirs = flow(baseline, teacher, times, initial=initial[1]).loss
    alive = theirs > FLOOR * 0.5 * float((np.asarray(teacher, dtype=float) ** 2).sum())
    return Curve(np.asarray(times)[alive], ours[alive] / theirs[alive])


def difference_series(student: Student, baseline: Student, teacher: Any, order: int) -> tuple[Fraction, ...]:
    """Return the coefficients of L_student(t) − L_baseline(t) at t = 0, exact to t^order."""
    return (loss_series(student, teacher, order) - loss_series(baseline, teacher, order)).coefficients


def starts_below(student: Student, baseline: Student, teacher: Any, order: int = 4) -> bool:
    """Return True if L_student < L_baseline just after t = 0, by the first nonzero coefficient, exactly."""
    first = next((c for c in difference_series(student, baseline, teacher, order) if c), Fraction(0))
    return first < 0


def stays_below(student: Student, baseline: Student, teacher: Any) -> tuple[bool, Curve]:
    """Return whether L_student(t) < L_baseline(t) for all t > 0, and the ratio of losses.

    Exact just after t = 0, integrated afterwards up to the precision of floats.
    """
    curve = loss_ratio(student, baseline, teacher)
    return starts_below(student, baseline, teacher) and curve.peak[0] < 1 - MARGIN, curve
