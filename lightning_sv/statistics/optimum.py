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
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_sv.errors import expect

#: nats per token above the lowest mean; points that are higher are not fitted
CLIFF = 0.1
#: largest factor between the settings of the minimum and those of the nearest run
FAR = 2.0

Array = NDArray[np.float64]
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
    """Fit loss = seed + L + (z - z*)'A(z - z*), z = log(values), around the lowest point.

    The fit has the lowest point and its neighbours along all axes, without those above `CLIFF`.

    Args:
        points: (N, K) positive values of the axes; a full grid, one with points left out, or a
            cross
        losses: (N, S) losses of the runs, nats per token; the same S seeds at every point
        planned: (M, K) points of the grid with those that diverged; by default `points`

    Raises:
        ConfigError: a loss that is not finite, or a value that is not positive
    """
    y = np.asarray(losses, dtype=np.float64)
    values = np.asarray(points, dtype=np.float64)
    expect(bool(np.isfinite(y).all()), "a loss", "not finite", "losses of runs that ended.")
    expect(bool((values > 0).all()), "a value of an axis", values.min(), "a number above 0.")
    means = y.mean(axis=1)
    lowest = int(np.argmin(means))
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
    is_end = (places[lowest] == 0) | (places[lowest] == places.max(axis=0))
    is_swept = np.ptp(planned, axis=0) > 0
    if (is_end & is_swept).any():
        raise _NoFitError("the lowest loss is at the end of the grid")

    means = y.mean(axis=1)
    is_neighbour = (abs(places - places[lowest]) <= 1).all(axis=1)
    near = is_neighbour & (means <= means[lowest] + CLIFF)
    varied = np.ptp(places, axis=0) > 0
    z = (x - x[lowest])[:, varied]
    fit = _fit_paraboloid(z[near], y[near], is_cross=_is_cross(z))
    _check_is_between(fit.minimum, z[near])
    best = values[lowest].copy()
    best[varied] *= np.exp(fit.minimum)
    _check_is_near_a_run(fit.minimum, z, best)

    errors = np.zeros(len(best))
    errors[varied] = fit.errors
    return Optimum(tuple(best.tolist()), tuple(errors.tolist()), fit.loss, fit.se, fit.df)


def _check_is_between(minimum: Array, fitted: Array) -> None:
    """Refuse a minimum (K,) beyond the fitted points (n, K) on an axis."""
    is_below = minimum < fitted.min(axis=0)
    is_above = minimum > fitted.max(axis=0)
    if (is_below | is_above).any():
        raise _NoFitError("the fit's minimum lies beyond the points around the lowest one")


def _check_is_near_a_run(minimum: Array, z: Array, best: Array) -> None:
    """Refuse a minimum (K,), with the settings `best`, that is far from all points (N, K)."""
    distances = abs(z - minimum).max(axis=1, initial=0.0)
    if distances.min() > math.log(FAR) + 1e-9:
        at = ", ".join(f"{value:.3g}" for value in best)
        limit = f"further than a factor of {FAR:g} from every run"
        raise _NoFitError(f"the fit's minimum ({at}) is {limit}")


class _Paraboloid(NamedTuple):
    """Minimum z* and L of a fitted paraboloid, with their errors; K axes vary."""

    minimum: Array  # (K,)
    errors: Array  # (K,)
    loss: float
    se: float
    df: int


def _fit_paraboloid(z: Array, y: Array, *, is_cross: bool) -> _Paraboloid:
    """Fit loss = seed + c + g'z + z'Az to y (N, S) at z (N, K) by least squares.

    Raises:
        _NoFitError: the points determine no paraboloid, or one without a minimum
    """
    n, n_axes = z.shape
    # axes of the products in A; a cross says nothing about those of two axes
    i, j = np.diag_indices(n_axes) if is_cross else np.triu_indices(n_axes)
    monomials = np.column_stack([np.ones(n), z, z[:, i] * z[:, j]])
    coefficients, _, rank, _ = np.linalg.lstsq(monomials, y.mean(axis=1))
    if rank < len(coefficients):
        raise _NoFitError("too few points lie around the lowest one, below the cliff")

    gradient = coefficients[1 : 1 + n_axes]
    a = np.zeros((n_axes, n_axes))
    a[i, j] = coefficients[1 + n_axes :]
    hessian = a + a.T
    if (np.linalg.eigvalsh(hessian) <= 0).any():
        raise _NoFitError("the losses around the lowest one curve down")
    minimum = np.linalg.solve(hessian, -gradient)
    loss = float(coefficients[0] + gradient @ minimum / 2)

    # errors of L and z* in L + (z - z*)'A(z - z*), by its derivatives by L, z* and A
    d = z - minimum
    derivatives = np.column_stack([np.ones(n), -d @ hessian, d[:, i] * d[:, j]])
    seeds = y.shape[1]
    df = y.size - len(coefficients) - (seeds - 1)  # the offsets of the seeds are fitted too
    variance = _residual_variance(y, monomials @ coefficients, df)
    squares = variance / seeds * (np.linalg.pinv(derivatives) ** 2).sum(axis=1)
    errors = np.sqrt(squares)
    return _Paraboloid(minimum, errors[1 : 1 + n_axes], loss, float(errors[0]), max(df, 0))


def _residual_variance(y: Array, fitted: Array, df: int) -> float:
    """Return the variance of a run without the offset of its seed; NaN if it is unknown."""
    if df <= 0:
        return math.nan
    within_seeds = y - y.mean(axis=0)
    residuals = within_seeds - (fitted - fitted.mean())[:, None]
    return float((residuals**2).sum()) / df


def _is_cross(z: Array) -> bool:
    """Return whether all points (N, K) differ from one of them in one axis at most."""
    return any(((z != centre).sum(axis=1) <= 1).all() for centre in z)
