"""Forward-mode differentiation of numpy code, over floats and over exact numbers alike.

Why not autograd: the same few lines of a model must give gradients in float64 (for an ODE solver) and in
power series with rational coefficients (for exact Taylor coefficients), and torch has no rationals.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

from lightning_sv.errors import ConfigError

Array = NDArray[Any]


class Dual(NDArrayOperatorsMixin):
    """x + ε·dx with ε² = 0: an array and its derivatives with respect to n inputs.

    Understands `+ - * /`, whole powers, `np.sqrt`, `np.exp`, `sum`, `mean` and indexing, with numpy's broadcasting.

    Args:
        value: x, any shape S; float64, or objects such as Fractions or Series
        tangent: dx, shape S + (n,)
    """

    def __init__(self, value: Array, tangent: Array):
        self.value, self.tangent = value, tangent

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of x."""
        return self.value.shape

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Numpy's hook: differentiate the functions of `_RULES`, refuse the others."""
        if ufunc not in _RULES or method != "__call__" or kwargs:
            known = " ".join(rule.__name__ for rule in _RULES)
            raise ConfigError(f"np.{ufunc.__name__} has no derivative here; a student may use: {known} sum mean.")
        return Dual(*_RULES[ufunc](*inputs))

    def __getitem__(self, key: Any) -> "Dual":
        keys = key if isinstance(key, tuple) else (key,)
        if not any(key is Ellipsis for key in keys):  # `in` would compare arrays
            keys = (*keys, Ellipsis)
        return Dual(self.value[keys], self.tangent[(*keys, slice(None))])

    def sum(self, axis: int | None = None) -> "Dual":
        """Sum over one axis, or over all."""
        axes = tuple(range(self.value.ndim)) if axis is None else (axis % self.value.ndim,)
        return Dual(np.asarray(self.value.sum(axes)), np.asarray(self.tangent.sum(axes)))

    def mean(self, axis: int | None = None) -> "Dual":
        """Mean over one axis, or over all."""
        total: Dual = self.sum(axis) / (self.value.size if axis is None else self.value.shape[axis])
        return total


def variables(blocks: list[Array]) -> list[Dual]:
    """Return the blocks as independent variables: input k of all n is entry k of the flattened blocks."""
    n = sum(block.size for block in blocks)
    exact = any(block.dtype == object for block in blocks)
    # Fractions, as int / int would leave the rationals
    identity = np.array([[Fraction(int(i == j)) for j in range(n)] for i in range(n)]) if exact else np.eye(n)
    return [Dual(block, tangent) for block, tangent in zip(blocks, split(identity, blocks), strict=True)]


def split(values: Array, like: Sequence[Array]) -> list[Array]:
    """Cut the first axis of an array into parts that have the shapes of some blocks."""
    parts, start = [], 0
    for block in like:
        parts.append(values[start : start + block.size].reshape(*block.shape, *values.shape[1:]))
        start += block.size
    return parts


def _column(x: Any) -> Array:
    return np.asarray(x)[..., None]


def _binary(ufunc: np.ufunc, tangent: Callable[..., Any]) -> Callable[[Any, Any], tuple[Array, Array]]:
    """Return the rule of a function of two, from its tangent by both values, both tangents and the result."""

    def rule(x: Any, y: Any) -> tuple[Array, Array]:
        (a, da), (b, db) = ((z.value, z.tangent) if isinstance(z, Dual) else (np.asarray(z), 0) for z in (x, y))
        value = np.asarray(ufunc(a, b))
        # the axes that broadcasting added to a value
        da, db = (
            dz if isinstance(dz, int) else dz.reshape((1,) * (value.ndim - z.ndim) + dz.shape)
            for z, dz in ((a, da), (b, db))
        )
        moved = tangent(_column(a), da, _column(b), db, _column(value))
        return value, np.broadcast_to(moved, (*value.shape, moved.shape[-1]))

    return rule


def _power(x: Dual, exponent: int) -> tuple[Array, Array]:
    if isinstance(exponent, Dual) or int(exponent) != exponent or exponent < 1:
        raise ConfigError(f"A student may take whole powers from 1 on, not {exponent!r}.")
    return np.asarray(x.value**exponent), x.tangent * _column(exponent * x.value ** (exponent - 1))


_RULES: dict[Any, Callable[..., tuple[Array, Array]]] = {
    np.add: _binary(np.add, lambda a, da, b, db, value: da + db),
    np.subtract: _binary(np.subtract, lambda a, da, b, db, value: da - db),
    np.negative: lambda x: (-x.value, -x.tangent),
    np.multiply: _binary(np.multiply, lambda a, da, b, db, value: da * b + a * db),
    np.divide: _binary(np.divide, lambda a, da, b, db, value: (da - value * db) / b),
    np.power: _power,
    np.sqrt: lambda x: (root := np.asarray(np.sqrt(x.value)), x.tangent / _column(2 * root)),
    np.exp: lambda x: (value := np.asarray(np.exp(x.value)), x.tangent * _column(value)),
}
