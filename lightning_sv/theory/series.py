"""Truncated power series in time with exact rational coefficients.

A `Series` is a scalar in numpy's object arrays: `+ - * /`, `np.sqrt` and `np.exp` work on such arrays.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from numbers import Rational
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_sv.errors import ConfigError

Array = NDArray[Any]


def _lifted(operation: Callable[["Series", "Series"], "Series"]) -> Callable[["Series", Any], "Series"]:
    """Let the second operand of a method also be a number."""

    def lifted(self: "Series", other: object) -> "Series":
        if isinstance(other, Rational | float):
            other = Series([other, *[0] * (len(self.coefficients) - 1)])
        return operation(self, other) if isinstance(other, Series) else NotImplemented

    return lifted


def _fraction(x: Rational | float) -> Fraction:
    # numpy's integers would stay inside the Fraction and overflow
    return Fraction(int(x.numerator), int(x.denominator)) if isinstance(x, Rational) else Fraction(float(x))


def exact(values: Any) -> Array:
    """Return an array of Fractions: integers, Fractions, or floats at their exact value."""
    given = np.asarray(values)
    return np.array([_fraction(x) for x in given.flat], dtype=object).reshape(given.shape)


class Series:
    """c_0 + c_1 t + ... + c_n t^n + O(t^(n+1)), every c_k a Fraction.

    Results have the order of the shorter operand; an int or a Fraction is exact to any order.

    >>> one_plus_t = Series([1, 1, 0, 0])
    >>> [str(c) for c in (1 / one_plus_t).coefficients]
    ['1', '-1', '1', '-1']
    >>> [str(c) for c in one_plus_t.sqrt().coefficients]
    ['1', '1/2', '-1/8', '1/16']

    Args:
        coefficients: at least c_0; ints, Fractions or finite floats (taken at their exact value)
    """

    __slots__ = ("coefficients",)

    def __init__(self, coefficients: Sequence[Rational | float]):
        self.coefficients = tuple(_fraction(c) for c in coefficients)

    def __repr__(self) -> str:
        return f"Series({' '.join(map(str, self.coefficients))})"

    @_lifted
    def __add__(self, b: "Series") -> "Series":
        return Series([x + y for x, y in zip(self.coefficients, b.coefficients, strict=False)])

    def __neg__(self) -> "Series":
        return Series([-x for x in self.coefficients])

    def __sub__(self, other: Any) -> Any:
        return self + -other

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    @_lifted
    def __mul__(self, b: "Series") -> "Series":
        x, y = self.coefficients, b.coefficients
        return Series([sum((x[i] * y[k - i] for i in range(k + 1)), Fraction(0)) for k in range(min(len(x), len(y)))])

    @_lifted
    def __truediv__(self, b: "Series") -> "Series":
        x, y = self.coefficients, b.coefficients
        quotient: list[Fraction] = []
        for k in range(min(len(x), len(y))):
            known = sum((quotient[i] * y[k - i] for i in range(k)), Fraction(0))
            quotient.append((x[k] - known) / y[0])
        return Series(quotient)

    @_lifted
    def __rtruediv__(self, a: "Series") -> "Series":
        return a / self

    def __pow__(self, exponent: int) -> Any:
        assert exponent >= 0, exponent
        return math.prod([self] * exponent)

    __radd__, __rmul__ = __add__, __mul__

    def sqrt(self) -> "Series":
        """Return the root r with r² = self and r_0 > 0; c_0 must be the square of a positive rational."""
        first = self.coefficients[0]
        root = Fraction(math.isqrt(max(first.numerator, 0)), math.isqrt(first.denominator))
        if not root or root * root != first:
            raise ConfigError(
                f"the constant term is {first}; expected the square of a positive rational for an exact root."
            )
        root_coefficients = [root]
        for k in range(1, len(self.coefficients)):
            known = sum((root_coefficients[i] * root_coefficients[k - i] for i in range(1, k)), Fraction(0))
            root_coefficients.append((self.coefficients[k] - known) / (2 * root))
        return Series(root_coefficients)

    def exp(self) -> "Series":
        """Return e^self, from e' = self' e; c_0 must be 0, because e is not rational."""
        if self.coefficients[0]:
            raise ConfigError(f"the constant term is {self.coefficients[0]}; expected 0 for an exact exp.")
        coefficients = [Fraction(1)]
        for k in range(1, len(self.coefficients)):
            coefficients.append(
                sum((j * self.coefficients[j] * coefficients[k - j] for j in range(1, k + 1)), Fraction(0)) / k
            )
        return Series(coefficients)
