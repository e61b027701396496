"""Truncated power series in time with exact rational coefficients.

A `Series` is a scalar in numpy's object arrays: `+ - * /`, `np.sqrt` and `np.exp` work on such arrays.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import isqrt
from numbers import Rational

from lightning_sv.errors import ConfigError


def _fraction(x: Rational | float) -> Fraction:
    if isinstance(x, Rational):
        # numpy's integers would stay inside the Fraction and overflow
        return Fraction(int(x.numerator), int(x.denominator))
    return Fraction(float(x))


class Series:
    """c_0 + c_1 t + ... + c_n t^n + O(t^(n+1)), every c_k a Fraction.

    Results have the order of the shorter operand; an int or a Fraction is exact to any order.

    >>> one_plus_t = Series([1, 1, 0, 0])
    >>> [str(c) for c in (1 / one_plus_t).coefficients]
    ['1', '-1', '1', '-1']
    >>> [str(c) for c in one_plus_t.sqrt().coefficients]
    ['1', '1/2', '-1/8', '1/16']

    Args:
        coefficients: c_0, c_1, ...; ints, Fractions or finite floats (taken at their exact value)

    Raises:
        ConfigError: there are no coefficients
    """

    __slots__ = ("coefficients",)

    def __init__(self, coefficients: Sequence[Rational | float]):
        self.coefficients = tuple(_fraction(c) for c in coefficients)
        if not self.coefficients:
            raise ConfigError("coefficients is empty; expected at least the constant term [c_0].")

    @property
    def order(self) -> int:
        """Largest known power of t."""
        return len(self.coefficients) - 1

    def __repr__(self) -> str:
        return f"Series({' '.join(map(str, self.coefficients))})"

    def _as_series(self, other: object) -> "Series | None":
        if isinstance(other, Series):
            return other
        if isinstance(other, Rational | float):
            return Series([_fraction(other), *[Fraction(0)] * self.order])
        return None

    def __add__(self, other: object) -> "Series":
        b = self._as_series(other)
        if b is None:
            return NotImplemented
        return Series([x + y for x, y in zip(self.coefficients, b.coefficients, strict=False)])

    def __neg__(self) -> "Series":
        return Series([-x for x in self.coefficients])

    def __sub__(self, other: object) -> "Series":
        b = self._as_series(other)
        return NotImplemented if b is None else self + -b

    def __rsub__(self, other: object) -> "Series":
        return -self + other

    def __mul__(self, other: object) -> "Series":
        b = self._as_series(other)
        if b is None:
            return NotImplemented
        x, y = self.coefficients, b.coefficients
        return Series([sum((x[i] * y[k - i] for i in range(k + 1)), Fraction(0)) for k in range(min(len(x), len(y)))])

    def __truediv__(self, other: object) -> "Series":
        b = self._as_series(other)
        if b is None:
            return NotImplemented
        x, y = self.coefficients, b.coefficients
        if not y[0]:
            raise ZeroDivisionError("a series that is 0 at t = 0 has no inverse")
        quotient: list[Fraction] = []
        for k in range(min(len(x), len(y))):
            known = sum((quotient[i] * y[k - i] for i in range(k)), Fraction(0))
            quotient.append((x[k] - known) / y[0])
        return Series(quotient)

    def __rtruediv__(self, other: object) -> "Series":
        a = self._as_series(other)
        return NotImplemented if a is None else a / self

    def __pow__(self, exponent: int) -> "Series":
        power = self._as_series(1)
        assert power is not None and exponent >= 0, exponent
        for _ in range(exponent):
            power = power * self
        return power

    __radd__, __rmul__ = __add__, __mul__

    def sqrt(self) -> "Series":
        """Return the root r with r² = self and r_0 > 0; c_0 must be the square of a positive rational."""
        first = self.coefficients[0]
        root = Fraction(isqrt(max(first.numerator, 0)), isqrt(first.denominator))
        if not root or root * root != first:
            raise ConfigError(
                f"the constant term is {first}; expected the square of a positive rational for an exact root."
            )
        root_coefficients = [root]
        for k in range(1, self.order + 1):
            known = sum((root_coefficients[i] * root_coefficients[k - i] for i in range(1, k)), Fraction(0))
            root_coefficients.append((self.coefficients[k] - known) / (2 * root))
        return Series(root_coefficients)

    def exp(self) -> "Series":
        """Return e^self, from e' = self' e; c_0 must be 0, because e is not rational."""
        if self.coefficients[0]:
            raise ConfigError(f"the constant term is {self.coefficients[0]}; expected 0 for an exact exp.")
        coefficients = [Fraction(1)]
        for k in range(1, self.order + 1):
            coefficients.append(
                sum((j * self.coefficients[j] * coefficients[k - j] for j in range(1, k + 1)), Fraction(0)) / k
            )
        return Series(coefficients)

    def __call__(self, t: float) -> float:
        """Return the value of the polynomial at t."""
        value = 0.0
        for c in reversed(self.coefficients):
            value = value * t + float(c)
        return value
