"""Optima of grids: a quadratic fit in the logarithms of the settings around the lowest loss.

Near its minimum the loss is a paraboloid in log(learning rate) and log(initial std). Its minimum is less biased than
the lowest point, which is also low by chance. Points more than `CLIFF` above it are omitted. A minimum at the end of
the grid, beyond it, or far from every run is rejected. A cross varies one setting at a time, with five points instead
of nine; its paraboloid has no product of two settings.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

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
        errors: standard errors of their natural logarithms; 0 for an axis of one value, nan if unknown
        loss: mean over the seeds, nats per token
        se: standard error of the loss without the offsets of the seeds; None without degrees of freedom
        why_not: why there is no fit; then `values` and `loss` are those of the lowest point
    """

    values: tuple[float, ...]
    errors: tuple[float, ...]
    loss: float
    se: float | None
    df: int
    why_not: str = ""


def fit_optimum(points: Rows, losses: Rows, planned: Rows = ()) -> Optimum:
    """The minimum z* = -A^-1 b / 2 of loss = seed + c + b'z + z'Az, z = log(values / those of the lowest point).

    The fit has the lowest point and its neighbours along all axes, without those above `CLIFF`. The errors of z* follow
    from those of the coefficients by the implicit function theorem, 2A dz* = -d(gradient).

    Args:
        points: (N, K) positive values of the axes; a full grid, one with points left out, or a cross
        losses: (N, S) losses of the runs, nats per token; the same S seeds at every point
        planned: (M, K) points of the grid with those that diverged; by default `points`
    """
    x, y = np.log(np.asarray(points, dtype=np.float64)), np.asarray(losses, dtype=np.float64)
    means = y.mean(axis=1)
    best = int(np.argmin(means))
    without = partial(Optimum, tuple(map(float, points[best])), (math.nan,) * x.shape[1], float(means[best]), None, 0)
    places = np.stack([np.unique(column, return_inverse=True)[1] for column in x.T], axis=1)
    last = places.max(axis=0)
    swept = np.ptp(np.asarray(planned or points, dtype=np.float64), axis=0) > 0
    if any(varied and place in (0, top) for varied, place, top in zip(swept, places[best], last, strict=True)):
        return without("the lowest loss is at the end of the grid")
    near = (abs(places - places[best]) <= 1).all(axis=1) & (means <= means[best] + CLIFF)
    free = [k for k in range(x.shape[1]) if last[k]]
    z = x[near][:, free] - x[best, free]
    i, j = _terms(x[:, free])
    design = _features(z, i, j)
    n, seeds = y[near].shape
    if np.linalg.matrix_rank(design) < design.shape[1]:
        return without("too few points lie around the lowest one, below the cliff")
    inverse = np.linalg.pinv(design)
    coefficients = inverse @ means[near]
    df = n * seeds - design.shape[1] - (seeds - 1)
    residuals = (y[near] - y[near].mean(axis=0)) - (design @ coefficients - means[near].mean())[:, None]
    variance = float((residuals**2).sum()) / df if df > 0 else math.nan
    covariance = variance / seeds * (inverse @ inverse.T)
    hessian = np.zeros((len(free), len(free)))
    hessian[i, j] += coefficients[1 + len(free) :]
    hessian[j, i] += coefficients[1 + len(free) :]
    if (np.linalg.eigvalsh(hessian) <= 0).any():
        return without("the losses around the lowest one curve down")
    minimum = np.linalg.solve(hessian, -coefficients[1 : 1 + len(free)])
    if (minimum < z.min(axis=0)).any() or (minimum > z.max(axis=0)).any():
        return without("the fit's minimum lies beyond the points around the lowest one")
    values = np.array(points[best], dtype=np.float64)
    values[free] *= np.exp(minimum)
    if free and abs(x[:, free] - x[best, free] - minimum).max(axis=1).min() > math.log(FAR) + 1e-9:
        at = ", ".join(f"{value:.3g}" for value in values)
        return without(f"the fit's minimum ({at}) is further than a factor of {FAR:g} from every run")
    features, half = _features(minimum[None], i, j)[0], np.eye(len(free)) / 2
    slopes = _features(minimum + half, i, j) - _features(minimum - half, i, j)  # exact, because they are quadratic
    moved = np.linalg.solve(hessian, slopes)
    errors = np.zeros(x.shape[1])
    errors[free] = np.sqrt(np.diag(moved @ covariance @ moved.T))
    se = math.sqrt(float(features @ covariance @ features)) if df > 0 else None
    return Optimum(tuple(map(float, values)), tuple(map(float, errors)), float(features @ coefficients), se, max(df, 0))


def _terms(x: Array) -> tuple[Integers, Integers]:
    """Choose the products of the coordinates x (N, K): all squares, and pairs that vary together."""
    i, j = np.triu_indices(x.shape[1])
    # all points of a cross lie on the two lines through its centre
    pairs = [x[:, [a, b]] for a, b in zip(i, j, strict=True)]
    crosses = [any((pair == centre).any(axis=1).all() for centre in pair) for pair in pairs]
    kept = (i == j) | ~np.array(crosses, dtype=bool)
    return i[kept], j[kept]


def _features(z: Array, i: Integers, j: Integers) -> Array:
    """(N, K) -> 1, z_k, z_i z_j: (N, 1 + K + number of products)."""
    return np.column_stack([np.ones(len(z)), z, z[:, i] * z[:, j]])
