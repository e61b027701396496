"""Truncated power series with exact rational coefficients, and derivatives of numpy code.

A `PowerSeries` is a scalar in numpy's object arrays: `+ - * /`, `np.sqrt` and `np.exp` work on such
arrays. Derivatives are not torch's, because the same code of a student must give gradients in
float64 (for an ODE solver) and in power series with rational coefficients (for exact Taylor
coefficients), which torch does not support.
"""

import math
import operator
import warnings
from collections.abc import Callable, Sequence
from fractions import Fraction
from numbers import Rational
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_sv.errors import ConfigError, expect

Array = NDArray[Any]
#: complex step; a power of 2 causes no rounding
TINY = 2.0**-100


def _lifted(
    operation: Callable[["PowerSeries", "PowerSeries"], "PowerSeries"],
) -> Callable[["PowerSeries", Any], "PowerSeries"]:
    """Let the second operand of a method also be a number."""

    def lifted(self: "PowerSeries", other: object) -> "PowerSeries":
        if isinstance(other, Rational | float):
            zeros = [0] * (len(self.coefficients) - 1)
            other = PowerSeries([other, *zeros])
        if not isinstance(other, PowerSeries):
            return NotImplemented
        return operation(self, other)

    return lifted


def _fraction(x: Rational | float) -> Fraction:
    if not isinstance(x, Rational):
        return Fraction(float(x))
    # numpy's integers would stay inside the Fraction and overflow
    return Fraction(int(x.numerator), int(x.denominator))


def split(values: Array, like: Sequence[Array]) -> list[Array]:
    """Split a vector into parts with the shapes of `like`."""
    parts = []
    start = 0
    for block in like:
        parts.append(values[start : start + block.size].reshape(block.shape))
        start += block.size
    return parts


def join(blocks: Sequence[Array]) -> Array:
    """Return the entries of all blocks as a vector, flattened by rows."""
    return np.concatenate([block.ravel() for block in blocks])


def jacobian(function: Callable[..., Any], blocks: Sequence[Array]) -> Array:
    """Return the derivatives of the function's value by the entries of the blocks, in float64.

    The step ε = 2⁻¹⁰⁰ i needs no difference, so that the error is one of rounding (Squire and Trapp
    1998). The function must be analytic: `np.abs` and `np.linalg.norm` are not. Shape: (size of the
    value, n).
    """
    theta = join(blocks).astype(float)
    moved = theta + 1j * TINY * np.eye(theta.size)
    values = [function(*split(row, blocks)).ravel() for row in moved]
    return np.array(values).imag.T / TINY


def exact_jacobian(function: Callable[..., Any], blocks: Sequence[Array]) -> Array:
    """Return the derivatives as `jacobian` does, of blocks of Fractions or PowerSeries.

    They are exact: x + ε with ε² = 0 is a series of order 1.
    """
    theta = join(blocks)
    columns = []
    for unit in np.eye(theta.size, dtype=int).tolist():
        moved = np.array([PowerSeries(terms) for terms in zip(theta, unit, strict=True)])
        values = function(*split(moved, blocks)).ravel()
        columns.append([coefficient(value, 1) for value in values])
    return np.array(columns).T


def coefficient(value: Any, k: int) -> Fraction:
    """Return the coefficient of t^k of a power series; 0 if the value does not depend on t."""
    if isinstance(value, PowerSeries):
        return value.coefficients[k]
    return Fraction(0)


def check_analytic(function: Callable[..., Any], blocks: Sequence[Array]) -> None:
    """Check that `jacobian` of floats agrees with a difference along one direction."""
    start = join(blocks).astype(float)
    cosine = np.cos(np.arange(start.size))
    # Zeros are moved, because the derivative by a scale vector is 0 at W = 0. Small entries take
    # small steps.
    theta = np.where(start == 0, 0.1 * cosine, start * (1 + 0.1 * cosine))
    direction = theta * np.cos(2 * np.arange(start.size) + 1)

    def value(at: Array) -> Array:
        return np.asarray(function(*split(at, blocks))).ravel()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", np.exceptions.ComplexWarning)
        slope = np.asarray(value(theta + 1j * TINY * direction)).imag / TINY
    step = 1e-5
    ahead = value(theta + step * direction)
    behind = value(theta - step * direction)
    error = np.linalg.norm(slope - (ahead - behind) / (2 * step))
    truncation = 1e-5 * np.linalg.norm(slope)
    rounding = 1e-9 * np.linalg.norm(ahead)
    if error > truncation + rounding:
        wanted = "one without np.abs, np.linalg.norm and assignments into real arrays."
        raise ConfigError(f"the function of the parameters is not analytic; expected {wanted}")


def exact(values: Any) -> Array:
    """Return an array of Fractions: integers, Fractions, or floats at their exact value."""
    given = np.asarray(values)
    return np.array([_fraction(x) for x in given.flat], dtype=object).reshape(given.shape)


class PowerSeries:
    """c_0 + c_1 t + ... + c_n t^n + O(t^(n+1)).

    Every c_k is a Fraction, or a series in a different variable.

    Results have the order of the shorter operand; an int or a Fraction is exact to any order.

    >>> one_plus_t = PowerSeries([1, 1, 0, 0])
    >>> [str(c) for c in (1 / one_plus_t).coefficients]
    ['1', '-1', '1', '-1']
    >>> [str(c) for c in one_plus_t.sqrt().coefficients]
    ['1', '1/2', '-1/8', '1/16']

    Args:
        coefficients: at least c_0; ints, Fractions or finite floats (taken at their exact value)
    """

    __slots__ = ("coefficients",)

    def __init__(self, coefficients: Sequence[Any]):
        self.coefficients: tuple[Any, ...] = tuple(
            c if isinstance(c, PowerSeries) else _fraction(c) for c in coefficients
        )

    def __repr__(self) -> str:
        return f"PowerSeries({' '.join(map(str, self.coefficients))})"

    @_lifted
    def __add__(self, b: "PowerSeries") -> "PowerSeries":
        return PowerSeries([x + y for x, y in zip(self.coefficients, b.coefficients, strict=False)])

    def __neg__(self) -> "PowerSeries":
        return PowerSeries([-x for x in self.coefficients])

    def __sub__(self, other: Any) -> Any:
        return self + -other

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    @_lifted
    def __mul__(self, b: "PowerSeries") -> "PowerSeries":
        x = self.coefficients
        y = b.coefficients
        return PowerSeries(
            [
                sum((x[i] * y[k - i] for i in range(k + 1)), Fraction(0))
                for k in range(min(len(x), len(y)))
            ]
        )

    @_lifted
    def __truediv__(self, b: "PowerSeries") -> "PowerSeries":
        x = self.coefficients
        y = b.coefficients
        quotient: list[Any] = []
        for k in range(min(len(x), len(y))):
            known = sum((quotient[i] * y[k - i] for i in range(k)), Fraction(0))
            quotient.append((x[k] - known) / y[0])
        return PowerSeries(quotient)

    @_lifted
    def __rtruediv__(self, a: "PowerSeries") -> "PowerSeries":
        return a / self

    def __pow__(self, exponent: int) -> Any:
        power = math.prod([self] * abs(operator.index(exponent)))
        return power if exponent >= 0 else 1 / power

    __radd__ = __add__
    __rmul__ = __mul__

    def sqrt(self) -> "PowerSeries":
        """Return the root r with r² = self and r_0 > 0.

        c_0 must be the square of a positive rational.
        """
        first = self.coefficients[0]
        roots = [first.sqrt() if isinstance(first, PowerSeries) else _root(first)]
        for k in range(1, len(self.coefficients)):
            known = sum((roots[i] * roots[k - i] for i in range(1, k)), Fraction(0))
            roots.append((self.coefficients[k] - known) / (2 * roots[0]))
        return PowerSeries(roots)

    def exp(self) -> "PowerSeries":
        """Return e^self, from e' = self' e; c_0 must be 0, because e is not rational."""
        first = self.coefficients[0]
        expect(
            isinstance(first, PowerSeries) or not first,
            "the constant term",
            first,
            "0 for an exact exp.",
        )
        values = [first.exp() if isinstance(first, PowerSeries) else Fraction(1)]
        for k in range(1, len(self.coefficients)):
            terms = (j * self.coefficients[j] * values[k - j] for j in range(1, k + 1))
            values.append(sum(terms, Fraction(0)) / k)
        return PowerSeries(values)


def _root(x: Fraction) -> Fraction:
    """Return the rational root of a positive square; raise `ConfigError` if it has none."""
    root = Fraction(math.isqrt(max(x.numerator, 0)), math.isqrt(x.denominator))
    expect(
        bool(root) and root * root == x,
        "the constant term",
        x,
        "the square of a positive rational.",
    )
    return root
