"""Gradient flow θ̇ = −∇L(θ) of a student: accurate integration and exact power series."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from scipy.integrate import solve_ivp

from lightning_sv.errors import ConfigError
from lightning_sv.theory.dual import Array, split
from lightning_sv.theory.series import Series
from lightning_sv.theory.students import Student, exact

RTOL, ATOL = 1e-12, 1e-14


@dataclass(frozen=True)
class Flow:
    """A trajectory: times (T,), loss (T,) and the parameters at each time."""

    times: Array
    loss: Array
    states: list[list[Array]]  #: T lists of the student's parameter blocks


def flow(
    student: Student,
    teacher: Any,
    times: Sequence[float] | Array,
    *,
    initial: list[Array] | None = None,
    method: str = "DOP853",
    rtol: float = RTOL,
    atol: float = ATOL,
) -> Flow:
    """Integrate θ̇ = −∇L(θ) from t = 0.

    Args:
        student: model with loss and gradient
        teacher: W*, shape (c, d)
        times: output times, increasing, ≥ 0; units of the flow
        initial: parameters at t = 0; None for the student's own
        method: method of scipy's solve_ivp, by default explicit Runge-Kutta of order 8
        rtol: relative tolerance of a step
        atol: absolute tolerance of a step

    Raises:
        ConfigError: the integration failed, or the teacher is not a matrix
    """
    target = _matrix(teacher).astype(float)
    blocks = student.initial(*target.shape) if initial is None else [np.asarray(b, dtype=float) for b in initial]

    def velocity(_: float, theta: Array) -> Array:
        return -student.gradient(split(theta, blocks), target)[1]

    at = np.asarray(times, dtype=float)
    solution = solve_ivp(velocity, (0.0, at[-1]), _join(blocks), method, t_eval=at, rtol=rtol, atol=atol)
    if not solution.success:
        raise ConfigError(f"the flow of {student.name!r} failed at t = {solution.t[-1]:g}: {solution.message}")
    states = [split(theta, blocks) for theta in solution.y.T]
    loss = [0.5 * np.sum((student.effective(*state) - target) ** 2) for state in states]
    return Flow(at, np.array(loss), states)


def power_series(student: Student, teacher: Any, order: int) -> list[Array]:
    """Return the exact power series of the parameters: θ_(k+1) = −[tᵏ] ∇L(θ_0 + ... + θ_k tᵏ) / (k + 1).

    Args:
        student: the model; its parameters at t = 0 must be rational, and so must A there
        teacher: W*, shape (c, d); floats are taken at their exact value
        order: largest power of t

    Returns:
        The student's blocks as arrays of `Series` of that order.
    """
    target = exact(_matrix(teacher))
    shapes = student.initial(*target.shape)
    known = [[Fraction(x)] for x in _join(shapes)]
    for k in range(order):
        theta = split(_objects([Series(c) for c in known]), shapes)
        _, gradient = student.gradient(theta, target)
        for coefficients, g in zip(known, gradient, strict=True):
            coefficients.append(-g.coefficients[k] / (k + 1) if isinstance(g, Series) else Fraction(0))
    return split(_objects([Series(c) for c in known]), shapes)


def loss_series(student: Student, teacher: Any, order: int) -> Series:
    """Return the power series of the loss along the flow, exact to t^order.

    >>> from lightning_sv.theory.students import STUDENTS
    >>> loss_series(STUDENTS["g"], [[2]], 3)  # 2 exp(-2t)
    Series(2 -4 4 -8/3)
    """
    target = exact(_matrix(teacher))
    residual = student.effective(*power_series(student, teacher, order)) - target
    loss = (residual * residual).sum() / 2
    assert isinstance(loss, Series)
    return loss


def _matrix(teacher: Any) -> Array:
    matrix = np.asarray(teacher)
    if matrix.ndim != 2 or not matrix.size:
        raise ConfigError(f"the shape of the teacher is {matrix.shape}; expected a matrix (outputs, inputs).")
    return matrix


def _objects(values: list[Any]) -> Array:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def _join(blocks: list[Array]) -> Array:
    return np.concatenate([block.ravel() for block in blocks])
