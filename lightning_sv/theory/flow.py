"""Gradient flow θ̇ = −∇L(θ) of a student.

Accurate integration, exact power series, and comparison of two students.
"""

import itertools
import reprlib
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from scipy.integrate import solve_ivp

from lightning_sv.errors import ConfigError, expect
from lightning_sv.theory.series import (
    Array,
    PowerSeries,
    check_analytic,
    coefficient,
    exact,
    join,
    split,
)
from lightning_sv.theory.students import Student

#: times from which the difference, of order t³, exceeds the integrator's error, until losses are
#: rounding errors
TIMES = np.concatenate([np.geomspace(0.01, 0.5, 25), np.linspace(0.52, 8, 188)])

#: fraction of the initial loss below which a residual is within the integrator's error
FLOOR = 1e-14

#: largest error of a ratio of losses early, when both are large; only there is a ratio close to 1
#: that stays below it
EARLY_ERROR = 1e-9
#: largest error of a ratio of losses down to `FLOOR`
RATIO_ERROR = 1e-3

#: most evaluations of the gradient per flow, seconds on one core; those of the claims take at most
#: 1,800
MOST_EVALUATIONS = 100_000


class Flow(NamedTuple):
    """A trajectory: loss (T,) and the parameters at each time."""

    loss: Array
    states: list[list[Array]]  #: T lists of the student's parameter blocks


def flow(
    student: Student,
    teacher: Any,
    times: Sequence[float] | Array,
    *,
    initial: list[Array] | None = None,
) -> Flow:
    """Integrate θ̇ = −∇L(θ) from t = 0 by a Runge-Kutta method of order 8.

    Args:
        student: model with loss and gradient
        teacher: W*, shape (c, d)
        times: output times, increasing, ≥ 0; units of the flow
        initial: parameters at t = 0; None for the student's own

    Raises:
        ConfigError: the flow is stiff or diverges, a shape is wrong, or A is not an analytic
            function
    """
    target = _matrix(teacher).astype(float)
    blocks = _initial_blocks(student, target, initial)
    check_analytic(student.effective, blocks)
    states = _integrate(student, target, blocks, np.asarray(times, dtype=float))
    residuals = np.array([student.effective(*state) - target for state in states])
    return Flow(0.5 * (residuals**2).sum((1, 2)), states)


def _initial_blocks(student: Student, target: Array, initial: list[Array] | None) -> list[Array]:
    """Return the parameters at t = 0 as floats, after a check of their shapes."""
    own = student.initial(*target.shape)
    if initial is None:
        initial = own
    blocks = [np.asarray(block, dtype=float) for block in initial]
    found = [block.shape for block in blocks]
    wanted = [block.shape for block in own]
    expect(
        found == wanted,
        "the shapes of initial",
        found,
        f"those of {student.name!r} for this teacher, {wanted}.",
    )
    shape = np.shape(student.effective(*blocks))
    expect(
        shape == target.shape,
        f"the shape of A of {student.name!r}",
        shape,
        f"that of the teacher, {target.shape}.",
    )
    return blocks


def _integrate(
    student: Student, target: Array, blocks: list[Array], at: Array
) -> list[list[Array]]:
    """Return the parameters at each time; raise `ConfigError` if the flow is stiff or diverges."""
    evaluations = itertools.count()

    def velocity(_: float, theta: Array) -> Array:
        if next(evaluations) == MOST_EVALUATIONS:
            raise ConfigError(
                f"the flow of {student.name!r} is too stiff to integrate to t = {at[-1]:g}; "
                "expected an earlier time or other initial parameters."
            )
        return -student.gradient(split(theta, blocks), target)

    size_of_target = float(np.abs(target).max()) or 1.0
    small = 1e-14 * min(1.0, size_of_target)
    solution = solve_ivp(
        velocity, (0.0, at[-1]), join(blocks), "DOP853", t_eval=at, rtol=1e-12, atol=small
    )
    if not solution.success:
        raise ConfigError(
            f"the flow of {student.name!r} failed at t = {solution.t[-1]:g}: {solution.message}"
        )
    return [split(theta, blocks) for theta in solution.y.T]


def power_series(student: Student, teacher: Any, order: int) -> list[Array]:
    """Return the exact power series of the parameters.

    θ_(k+1) = −[tᵏ] ∇L(θ_0 + ... + θ_k tᵏ) / (k + 1).

    Args:
        student: the model; its parameters at t = 0 must be rational, and so must A there
        teacher: W*, shape (c, d); floats are taken at their exact value
        order: largest power of t

    Returns:
        The student's blocks as arrays of `PowerSeries` of that order.

    Raises:
        ConfigError: the teacher is not a matrix
    """
    target = exact(_matrix(teacher))
    start = student.initial(*target.shape)
    known = [[x] for x in exact(join(start))]  # coefficients found so far, a list per parameter
    for k in range(order):
        # parameters cut off after t^k determine the gradient up to t^k
        gradient = student.gradient(_series_blocks(known, start), target)
        for coefficients, slope in zip(known, gradient, strict=True):
            coefficients.append(-coefficient(slope, k) / (k + 1))
    return _series_blocks(known, start)


def _series_blocks(coefficients: list[list[Fraction]], like: list[Array]) -> list[Array]:
    """Return the series of all parameters as blocks with the shapes of `like`."""
    return split(np.array([PowerSeries(c) for c in coefficients]), like)


def loss_series(student: Student, teacher: Any, order: int) -> PowerSeries:
    """Return the power series of the loss along the flow, exact to t^order.

    >>> from lightning_sv.theory.students import STUDENTS
    >>> loss_series(STUDENTS["g"], [[2]], 3)  # 2 exp(-2t)
    PowerSeries(2 -4 4 -8/3)
    """
    target = exact(_matrix(teacher))
    residual = student.effective(*power_series(student, teacher, order)) - target
    return (residual * residual).sum() / 2


class LossRatio(NamedTuple):
    """L_student(t) / L_baseline(t) at times of the flow."""

    times: Array  #: (T,)
    values: Array  #: (T,)

    @property
    def largest(self) -> float:
        """Largest ratio."""
        return float(self.values.max())

    @property
    def time_of_largest(self) -> float:
        """Time of the largest ratio."""
        return float(self.times[self.values.argmax()])

    @property
    def stays_below_one(self) -> bool:
        """True if the student's loss is the lower one at all times, beyond rounding.

        False may also mean that the first losses are too close to tell, as those of a small teacher
        are. `starts_below` is exact there.
        """
        return self.largest < 1 - EARLY_ERROR

    @property
    def exceeds_one(self) -> bool:
        """True if the student's loss is the higher one at some time, beyond the error."""
        return self.largest > 1 + RATIO_ERROR

    def first_above(self, level: float) -> float:
        """Return the first time at which the ratio exceeds `level`, linear between times.

        It is infinite if the ratio never does.
        """
        above = np.flatnonzero(self.values > level)
        if not above.size:
            return float("inf")
        k = int(above[0])
        if k == 0:
            return float(self.times[0])
        around = slice(k - 1, k + 1)
        return float(np.interp(level, self.values[around], self.times[around]))


def loss_ratio(
    student: Student,
    baseline: Student,
    teacher: Any,
    times: Array = TIMES,
    *,
    student_start: list[Array] | None = None,
    baseline_start: list[Array] | None = None,
) -> LossRatio:
    """Return L_student(t) / L_baseline(t), while the baseline's loss is above rounding.

    Args:
        student: student of the numerator
        baseline: student of the denominator
        teacher: W*, shape (c, d)
        times: increasing, > 0
        student_start: parameters of the student at t = 0; None for its own
        baseline_start: parameters of the baseline at t = 0; None for its own
    """
    first = float(np.ravel(times)[0])
    expect(first > 0, "the first time", first, "a time above 0, because all losses start equal.")
    ours = flow(student, teacher, times, initial=student_start).loss
    theirs = flow(baseline, teacher, times, initial=baseline_start).loss
    loss_of_zero = 0.5 * float((_matrix(teacher).astype(float) ** 2).sum())
    alive = theirs > FLOOR * loss_of_zero
    expect(
        bool(alive.any()),
        "the baseline's loss",
        "0 or a rounding error",
        "a loss above that at the first time.",
    )
    return LossRatio(np.asarray(times)[alive], ours[alive] / theirs[alive])


def difference_series(
    student: Student, baseline: Student, teacher: Any, order: int
) -> tuple[Fraction, ...]:
    """Return the coefficients of L_student(t) − L_baseline(t) at t = 0, exact to t^order."""
    return (
        loss_series(student, teacher, order) - loss_series(baseline, teacher, order)
    ).coefficients


def starts_below(student: Student, baseline: Student, teacher: Any) -> bool:
    """Return whether L_student(t) < L_baseline(t) just after t = 0.

    The first coefficient of the difference that is not 0 decides, up to t⁴; it is exact, where the
    difference of integrated losses would be a rounding error.
    """
    for coefficient_of_difference in difference_series(student, baseline, teacher, 4):
        if coefficient_of_difference:
            return coefficient_of_difference < 0
    return False


def _matrix(teacher: Any) -> Array:
    """Return W* (c, d) of a `Teacher` or of rows of numbers."""
    matrix = np.asarray(getattr(teacher, "matrix", teacher))
    expect(matrix.ndim == 2, "the teacher", reprlib.repr(teacher), "a matrix (outputs, inputs).")
    return matrix
