"""Gradient flow θ̇ = −∇L(θ) of a student.

Accurate integration, exact power series, and comparison of two students.
"""

import itertools
import reprlib
from collections.abc import Sequence
from contextlib import suppress
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

#: largest error of a loss ratio: at early times, and up to `FLOOR`
MARGIN = 1e-9
EQUAL = 1e-3

#: evaluations of the gradient after which a flow is stiff; those of the claims take at most 1,800
STIFF = 20_000


class _Stiff(Exception):
    """The flow took too many evaluations."""


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
    """Integrate θ̇ = −∇L(θ) from t = 0.

    By a Runge-Kutta method of order 8, or by LSODA if the flow is stiff.

    Args:
        student: model with loss and gradient
        teacher: W*, shape (c, d)
        times: output times, increasing, ≥ 0; units of the flow
        initial: parameters at t = 0; None for the student's own

    Raises:
        ConfigError: the integration failed, a shape, a time or an entry of the teacher is wrong, or
            A is not an analytic function
    """
    target = _matrix(teacher).astype(float)
    blocks = _initial_blocks(student, target, initial)
    problem = _GradientFlow(student, target, blocks)
    at = _increasing(times)
    problem.check()
    solution = problem.solve(at)
    if not solution.success:
        raise ConfigError(
            f"the flow of {student.name!r} failed at t = {solution.t[-1]:g}: {solution.message}"
        )
    thetas = solution.y.T
    loss = np.array([problem.loss(theta) for theta in thetas])
    return Flow(loss, [split(theta, blocks) for theta in thetas])


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


def _increasing(times: Sequence[float] | Array) -> Array:
    """Return the output times as an array; they must increase from 0 or more to more than 0."""
    at = np.asarray(times, dtype=float)
    is_list = at.ndim == 1 and at.size > 0
    increases = is_list and bool((np.diff(at) > 0).all())
    is_valid = increases and at[0] >= 0 and at[-1] > 0
    expect(bool(is_valid), "times", times, "increasing times from 0, of which the last is above 0.")
    return at


class _GradientFlow:
    """Equation θ̇ = −∇L(θ) of a student whose parameters are joined into one vector θ."""

    def __init__(self, student: Student, target: Array, blocks: list[Array]):
        self.student = student
        self.target = target
        self.blocks = blocks
        self.start = join(blocks).astype(float)

    def loss(self, theta: Array) -> float:
        """Return ½‖A − W*‖²."""
        effective = self.student.effective(*split(theta, self.blocks))
        return float(0.5 * np.sum((effective - self.target) ** 2))

    def gradient(self, theta: Array) -> Array:
        """Return ∇L."""
        return self.student.gradient(split(theta, self.blocks), self.target)

    def check(self) -> None:
        """Raise `ConfigError` if the gradient at t = 0 is not finite, or A is not analytic."""
        is_finite = bool(np.isfinite(self.gradient(self.start)).all())
        expect(
            is_finite,
            f"the gradient of {self.student.name!r} at t = 0",
            "not finite",
            "finite numbers.",
        )
        check_analytic(self.student.effective, self.blocks)

    def solve(self, at: Array) -> Any:
        """Integrate with the method for smooth flows; if it is slow, with that for stiff flows."""
        for method, limit in (("DOP853", STIFF), ("LSODA", 4 * STIFF)):
            with suppress(_Stiff):
                return self._integrate(at, method, limit)
        raise ConfigError(
            f"the flow of {self.student.name!r} is too stiff to integrate to t = {at[-1]:g}."
        )

    def _integrate(self, at: Array, method: str, limit: int) -> Any:
        evaluations = itertools.count()

        def velocity(_: float, theta: Array) -> Array:
            if next(evaluations) == limit:
                raise _Stiff
            return -self.gradient(theta)

        size_of_target = float(np.abs(self.target).max()) or 1.0
        small = 1e-14 * min(1.0, size_of_target)
        return solve_ivp(
            velocity, (0.0, at[-1]), self.start, method, t_eval=at, rtol=1e-12, atol=small
        )


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
        ConfigError: the order is negative, or the teacher is not a matrix of finite numbers
    """
    expect(order >= 0, "the order", order, "at least 0.")
    target = exact(_matrix(teacher))
    shapes = student.initial(*target.shape)
    known = [[x] for x in exact(join(shapes))]
    for k in range(order):
        theta = split(np.array([PowerSeries(c) for c in known]), shapes)
        for coefficients, g in zip(known, student.gradient(theta, target), strict=True):
            coefficients.append(-coefficient(g, k) / (k + 1))
    return split(np.array([PowerSeries(c) for c in known]), shapes)


def loss_series(student: Student, teacher: Any, order: int) -> PowerSeries:
    """Return the power series of the loss along the flow, exact to t^order.

    >>> from lightning_sv.theory.students import STUDENTS
    >>> loss_series(STUDENTS["g"], [[2]], 3)  # 2 exp(-2t)
    PowerSeries(2 -4 4 -8/3)
    """
    target = exact(_matrix(teacher))
    residual = student.effective(*power_series(student, teacher, order)) - target
    return (residual * residual).sum() / 2


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
        """Return the first time at which the value exceeds `level`, linear between times.

        It is infinite if the value never does.
        """
        above = self.values > level
        if not above.any():
            return float("inf")
        k = int(above.argmax())
        return float(
            np.interp(level, self.values[k - 1 : k + 1], self.times[k - 1 : k + 1])
            if k
            else self.times[0]
        )


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
    alive = theirs > FLOOR * 0.5 * float((_matrix(teacher).astype(float) ** 2).sum())
    expect(
        bool(alive.any()),
        "the baseline's loss",
        "0 or a rounding error",
        "a loss above that at the first time.",
    )
    return Curve(np.asarray(times)[alive], ours[alive] / theirs[alive])


def difference_series(
    student: Student, baseline: Student, teacher: Any, order: int
) -> tuple[Fraction, ...]:
    """Return the coefficients of L_student(t) − L_baseline(t) at t = 0, exact to t^order."""
    return (
        loss_series(student, teacher, order) - loss_series(baseline, teacher, order)
    ).coefficients


def stays_below(student: Student, baseline: Student, teacher: Any) -> tuple[bool, Curve]:
    """Return whether L_student(t) < L_baseline(t) for all t > 0, and the ratio of losses.

    Exact just after t = 0, by the first coefficient that is not 0; integrated afterwards up to the
    precision of floats.
    """
    curve = loss_ratio(student, baseline, teacher)
    first = next((c for c in difference_series(student, baseline, teacher, 4) if c), Fraction(0))
    return first < 0 and curve.peak[0] < 1 - MARGIN, curve


def _matrix(teacher: Any) -> Array:
    given = getattr(teacher, "matrix", teacher)
    try:
        matrix = np.asarray(given)
        fits = matrix.ndim == 2 and matrix.size > 0 and matrix.dtype.kind in "biufO"
        fits = fits and bool(np.isfinite(matrix.astype(float)).all())
    # rows of different lengths, or an entry that is not a number
    except (
        TypeError,
        ValueError,
        OverflowError,
    ):
        fits = False
    expect(
        fits,
        "the teacher",
        reprlib.repr(given),
        "a matrix (outputs, inputs) of real, finite numbers.",
    )
    return matrix
