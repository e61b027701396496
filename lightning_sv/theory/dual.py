"""Forward-mode differentiation of numpy code, for floats and exact numbers.

Not autograd, because the same code of a model must give gradients in float64 (for an ODE solver) and in power series
with rational coefficients (for exact Taylor coefficients), which torch does not support.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from lightning_sv.errors import ConfigError
from lightning_sv.theory.series import Array, exact


class Dual(NDArrayOperatorsMixin):
    """x + ε·dx with ε² = 0: an array and its derivatives with respect to n inputs.

    Supports `+ - * /`, integer powers, `np.sqrt`, `np.exp`, `sum`, `mean` and indexing, with numpy's broadcasting.

    Args:
        value: x, any shape S; float64, or objects such as Fractions or Series
        tangent: dx, shape S + (n,)
    """

    def __init__(self, value: Array, tangent: Array):
        self.value, self.tangent = value, tangent

    @property
    def jacobian(self) -> Array:
        """∂vec(x)/∂inputs, shape (size of x, n), x flattened by rows."""
        return np.asarray(self.tangent.reshape(self.value.size, -1))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of x."""
        return self.value.shape

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Differentiate the functions of `_RULES` as numpy's hook, and reject others."""
        if ufunc not in _RULES or method != "__call__" or kwargs:
            known = " ".join(rule.__name__ for rule in _RULES)
            raise ConfigError(f"np.{ufunc.__name__} is not supported in a student; expected one of: {known} sum mean.")
        return Dual(*_RULES[ufunc](*inputs))

    def __getitem__(self, key: Any) -> "Dual":
        keys = key if isinstance(key, tuple) else (key,)
        return Dual(self.value[keys], self.tangent[(*keys, ..., slice(None))])

    def sum(self, axis: int | None = None) -> "Dual":
        """Return the sum over one axis, or over all."""
        axes = tuple(range(self.value.ndim)) if axis is None else (axis % self.value.ndim,)
        return Dual(np.asarray(self.value.sum(axes)), np.asarray(self.tangent.sum(axes)))

    def mean(self, axis: int | None = None) -> "Dual":
        """Return the mean over one axis, or over all."""
        total: Dual = self.sum(axis) / (self.value.size if axis is None else self.value.shape[axis])
        return total


def variables(blocks: Sequence[Array]) -> list[Dual]:
    """Return the blocks as independent variables, in the order of their flattened entries."""
    n = sum(block.size for block in blocks)
    # Fractions, because int / int would be a float
    identity = exact(np.eye(n)) if any(block.dtype == object for block in blocks) else np.eye(n)
    return [Dual(block, tangent) for block, tangent in zip(blocks, split(identity, blocks), strict=True)]


def split(values: Array, like: Sequence[Array]) -> list[Array]:
    """Split the first axis of an array into parts with the shapes of `like`."""
    parts = np.split(values, np.cumsum([block.size for block in like])[:-1])
    return [part.reshape(*block.shape, *values.shape[1:]) for part, block in zip(parts, like, strict=True)]


def _column(x: Any) -> Array:
    return np.asarray(x)[..., None]


def _binary(ufunc: np.ufunc, tangent: Callable[..., Any]) -> Callable[[Any, Any], tuple[Array, Array]]:
    def rule(x: Any, y: Any) -> tuple[Array, Array]:
        (a, da), (b, db) = ((z.value, z.tangent) if isinstance(z, Dual) else (np.asarray(z), 0) for z in (x, y))
        value = np.asarray(ufunc(a, b))
        moved = tangent(_column(a), da, _column(b), db, _column(value))
        return value, np.broadcast_to(moved, (*value.shape, moved.shape[-1]))

    return rule


def _power(x: Dual, exponent: int) -> tuple[Array, Array]:
    if isinstance(exponent, Dual) or int(exponent) != exponent or exponent < 1:
        raise ConfigError(f"the exponent is {exponent!r}; expected an integer of at least 1 in a student.")
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
