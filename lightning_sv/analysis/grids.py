"""Grids of a learning rate or an initial std: the optimum of each arm, its error, and the pairs a decision needs."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit


class Optimum(NamedTuple):
    """The best value of a grid.

    Attributes:
        at: index of the value
        value: of the axis
        loss: mean over the seeds, nats per token
        error: by how much the loss at the true optimum may be lower; infinite where the best value is the grid's
            end, for then the optimum may lie outside
    """

    at: int
    value: float
    loss: float
    error: float


def optimum(values: Sequence[float], losses: Sequence[float]) -> Optimum:
    """The least loss of a grid; its error is the depth of the parabola in log(value) through it and its neighbours.

    Args:
        values: (N,) of the axis, positive and distinct
        losses: (N,) means over the same seeds, nats per token
    """
    order = np.argsort(values)
    x, y = np.log(np.asarray(values, dtype=np.float64)[order]), np.asarray(losses, dtype=np.float64)[order]
    i = int(np.argmin(y))
    index = int(order[i])
    error = math.inf
    if 0 < i < len(x) - 1:
        c2, c1, c0 = np.polyfit(x[i - 1 : i + 2] - x[i], y[i - 1 : i + 2], 2)
        error = max(0.0, float(y[i] - (c0 - c1**2 / (4 * c2)))) if c2 > 0 else 0.0
    return Optimum(index, float(values[index]), float(y[i]), error)


def pairs_needed(spread: float, margin: float, confidence: float = 0.95, most: int = 10_000) -> int | None:
    """min{n >= 2 : t(confidence, n - 1) spread / sqrt(n) <= margin}; None where that is more than `most`.

    In two stages: the spread is the pilot's, taken as known, and the pilot's pairs count among the n. Stein's n (Annals
    of Mathematical Statistics 16, 1945) keeps the quantile of the pilot's own size, which for pilots of three pairs is
    more than twice as wide; here the final interval is checked against the margin instead.

    Args:
        spread: standard deviation of the pilot's differences, nats per token
        margin: half width of the interval aimed at, nats per token
        confidence: coverage of the interval
        most: where the search ends
    """
    quantile = 0.5 + confidence / 2
    for n in range(2, most + 1):
        if stdtrit(n - 1, quantile) * spread / math.sqrt(n) <= margin:
            return n
    return None
