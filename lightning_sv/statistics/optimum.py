"""Optima of grids: a quadratic fit in the logarithms of the settings around the lowest loss.

Near its minimum the loss is a paraboloid in log(learning rate) and log(initial std). Its minimum is
less biased than the lowest point, which is also low by chance. Points more than `CLIFF` above it
are omitted. A minimum at the end of the grid, beyond it, or far from every run is rejected. A cross
varies one setting at a time, with five points instead of nine; its paraboloid has no product of two
settings.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: nats per token above the lowest mean; points that are higher are not fitted
CLIFF = 0.1
#: largest factor between the settings of the minimum and those of the nearest run
FAR = 2.0

Array = NDArray[np.float64]
Integers = NDArray[np.intp]
Rows = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Optimum:
    """Settings at which the loss of an arm is lowest, and that loss.

    Attributes:
        values: settings, in the order of the axes
        errors: standard errors of their natural logarithms; 0 for an axis of one value, nan if
            unknown
        loss: mean over the seeds, nats per token
        se: standard error of the loss without the offsets of the seeds; NaN without degrees of
            freedom
        df: degrees of freedom of the residual variance; 0 without a fit
        why_not: why there is no fit; then `values` and `loss` are those of the lowest point
    """

    values: tuple[float, ...]
    errors: tuple[float, ...]
    loss: float
    se: float
    df: int
    why_not: str = ""


class _NoFitError(Exception):
    """The losses around the lowest point have no fitted minimum."""


def fit_optimum(points: Rows, losses: Rows, planned: Rows = ()) -> Optimum:
    """z* = -A^-1 b / 2 of loss = seed + c + b'z + z'Az, z = log(values / lowest point's values).

    The fit has the lowest point and its neighbours along all axes, without those above `CLIFF`.

    Args:
        points: (N, K) positive values of the axes; a full grid, one with points left out, or a
            cross
        losses: (N, S) losses of the runs, nats per token; the same S seeds at every point
        planned: (M, K) points of the grid with those that diverged; by default `points`
    """
    y = np.asarray(losses, dtype=np.float64)
    means = y.mean(axis=1)
    lowest = int(np.argmin(means))
    values = np.asarray(points, dtype=np.float64)
    try:
        return _fit(values, y, lowest, np.asarray(planned or points, dtype=np.float64))
    except _NoFitError as reason:
        unknown = (math.nan,) * values.shape[1]
        at_lowest = tuple(map(float, points[lowest]))
        return Optimum(at_lowest, unknown, float(means[lowest]), math.nan, 0, str(reason))


def _fit(values: Array, y: Array, lowest: int, planned: Array) -> Optimum:
    """Fit a paraboloid to the losses y (N, S) at values (N, K) around the lowest point.

    Raises:
        _NoFitError: there is no minimum between the points
    """
    x = np.log(values)
    # index of each point along each axis
    places = np.stack([np.unique(column, return_inverse=True)[1] for column in x.T], axis=1)
    is_swept = np.ptp(planned, axis=0) > 0
    _check_lowest_is_inside_grid(places, places[lowest], is_swept)

    means = y.mean(axis=1)
    is_neighbour = (abs(places - places[lowest]) <= 1).all(axis=1)
    near = is_neighbour & (means <= means[lowest] + CLIFF)
    n_values = places.max(axis=0) + 1
    varied = [axis for axis, n in enumerate(n_values) if n > 1]
    z = x[:, varied] - x[lowest, varied]  # (N, number of varied axes)
    paraboloid = _Paraboloid(z[near], y[near], *_product_axes(x[:, varied]))
    _check_minimum_is_between_fitted_points(paraboloid.minimum, z[near])
    best = values[lowest].copy()
    best[varied] *= np.exp(paraboloid.minimum)
    if varied:
        _check_minimum_is_near_a_run(paraboloid.minimum, z, best)

    errors = np.zeros(x.shape[1])
    errors[varied] = paraboloid.errors_of_minimum()
    return Optimum(
        tuple(map(float, best)),
        tuple(map(float, errors)),
        paraboloid.loss_at_minimum,
        paraboloid.error_of_loss(),
        max(paraboloid.df, 0),
    )


def _check_lowest_is_inside_grid(
    places: Integers, lowest: Integers, is_swept: NDArray[np.bool_]
) -> None:
    """Refuse a lowest point at an end of an axis that the grid sweeps; by indices (N, K), (K,)."""
    is_end = (lowest == 0) | (lowest == places.max(axis=0))
    if (is_swept & is_end).any():
        raise _NoFitError("the lowest loss is at the end of the grid")


def _check_minimum_is_between_fitted_points(minimum: Array, z: Array) -> None:
    """Refuse a minimum (K,) beyond the fitted points (N, K) on an axis."""
    is_below = minimum < z.min(axis=0)
    is_above = minimum > z.max(axis=0)
    if (is_below | is_above).any():
        raise _NoFitError("the fit's minimum lies beyond the points around the lowest one")


def _check_minimum_is_near_a_run(minimum: Array, z: Array, best: Array) -> None:
    """Refuse a minimum (K,), with the settings `best`, that is far from all points (N, K)."""
    distances = abs(z - minimum).max(axis=1)
    if distances.min() > math.log(FAR) + 1e-9:
        at = ", ".join(f"{value:.3g}" for value in best)
        limit = f"further than a factor of {FAR:g} from every run"
        raise _NoFitError(f"the fit's minimum ({at}) is {limit}")


class _Paraboloid:
    """The least-squares fit of loss = seed + c + b'z + z'Az to y (N, S) at z (N, K).

    i and j are the axes of the products z_i z_j.
    """

    def __init__(self, z: Array, y: Array, i: Integers, j: Integers):
        self._i = i
        self._j = j
        self._n_axes = z.shape[1]
        design = self._features(z)
        if np.linalg.matrix_rank(design) < design.shape[1]:
            raise _NoFitError("too few points lie around the lowest one, below the cliff")

        inverse = np.linalg.pinv(design)
        self._coefficients = inverse @ y.mean(axis=1)
        n, seeds = y.shape
        #: degrees of freedom of the residual variance
        self.df = n * seeds - design.shape[1] - (seeds - 1)
        variance = self._residual_variance(y, design @ self._coefficients)
        self._covariance = variance / seeds * (inverse @ inverse.T)

        self._hessian = self._second_derivatives()
        if (np.linalg.eigvalsh(self._hessian) <= 0).any():
            raise _NoFitError("the losses around the lowest one curve down")
        gradient = self._coefficients[1 : 1 + self._n_axes]
        #: (K,)
        self.minimum: Array = np.linalg.solve(self._hessian, -gradient)

    def _residual_variance(self, y: Array, fitted: Array) -> float:
        """Return the variance of a run without the offset of its seed; NaN if it is unknown."""
        if self.df <= 0:
            return math.nan
        within_seeds = y - y.mean(axis=0)
        residuals = within_seeds - (fitted - y.mean(axis=1).mean())[:, None]
        return float((residuals**2).sum()) / self.df

    def _second_derivatives(self) -> Array:
        """Return 2A (K, K)."""
        products = self._coefficients[1 + self._n_axes :]
        hessian = np.zeros((self._n_axes, self._n_axes))
        hessian[self._i, self._j] += products
        hessian[self._j, self._i] += products
        return hessian

    @property
    def loss_at_minimum(self) -> float:
        """Loss at the minimum, mean over the seeds."""
        return float(self._features(self.minimum[None])[0] @ self._coefficients)

    def error_of_loss(self) -> float:
        """Return the standard error of the loss at the minimum; NaN without degrees of freedom."""
        features = self._features(self.minimum[None])[0]
        return math.sqrt(float(features @ self._covariance @ features))

    def errors_of_minimum(self) -> Array:
        """Return the standard errors (K,) of the minimum z*.

        They follow from those of the coefficients by the implicit function theorem,
        2A dz* = -d(gradient).
        """
        half = np.eye(self._n_axes) / 2
        # differences of a quadratic function are exact
        slopes = self._features(self.minimum + half) - self._features(self.minimum - half)
        moved = np.linalg.solve(self._hessian, slopes)
        errors: Array = np.sqrt(np.diag(moved @ self._covariance @ moved.T))
        return errors

    def _features(self, z: Array) -> Array:
        """(N, K) -> 1, z_k, z_i z_j: (N, 1 + K + number of products)."""
        return np.column_stack([np.ones(len(z)), z, z[:, self._i] * z[:, self._j]])


def _product_axes(x: Array) -> tuple[Integers, Integers]:
    """Return the axes i and j of the products z_i z_j of a paraboloid at x (N, K).

    They are all squares, and products of two axes that vary together.
    """
    i, j = np.triu_indices(x.shape[1])
    is_kept = [a == b or not _is_cross(x[:, [a, b]]) for a, b in zip(i, j, strict=True)]
    kept = np.array(is_kept, dtype=bool)
    return i[kept], j[kept]


def _is_cross(pair: Array) -> bool:
    """Return whether all points (N, 2) lie on the two lines through one of them."""
    return any((pair == centre).any(axis=1).all() for centre in pair)
