"""Optima of grids, on paraboloids with a known minimum and with simulated noise."""

import math
from itertools import product

import numpy as np
import pytest

from lightning_sv.errors import ConfigError
from lightning_sv.statistics.optimum import Optimum, fit_optimum

POINTS = list(product((0.003, 0.006, 0.012, 0.024), (0.01, 0.02, 0.04)))
BEST = (0.0075, 0.023)


def losses(cliff: float = math.inf) -> np.ndarray:
    """Return 3.5 + a paraboloid with a product around `BEST`; rates above `cliff` have a loss of
    9."""
    z = np.log(np.array(POINTS) / BEST)
    found = 3.5 + 0.05 * z[:, 0] ** 2 + 0.03 * z[:, 1] ** 2 + 0.02 * z[:, 0] * z[:, 1]
    return np.where(np.array(POINTS)[:, 0] > cliff, 9.0, found)


def test_fit_optimum_paraboloid_is_found_exactly() -> None:
    y = losses()[:, None] + np.array([0.0, 0.3, -0.2])
    found = fit_optimum(POINTS[::-1], y[::-1])
    assert found.values == pytest.approx(BEST, rel=1e-9) and not found.why_not
    assert found.loss == pytest.approx(3.5 + 0.1 / 3) and found.se == pytest.approx(0.0, abs=1e-9)
    assert found.df == 9 * 3 - 6 - 2
    line = [i for i, (_, std) in enumerate(POINTS) if std == 0.02]
    one = fit_optimum([POINTS[i] for i in line], y[line])
    z = math.log(0.02 / BEST[1])  # along the line the minimum moves by -0.02 z / (2 * 0.05)
    assert one.values == pytest.approx((BEST[0] * math.exp(-0.2 * z), 0.02))
    assert one.errors[1] == 0.0


@pytest.mark.parametrize("centre", [(0.006, 0.02), (0.012, 0.02)])
def test_fit_optimum_cross_has_no_products(centre: tuple[float, float]) -> None:
    """Five points determine a paraboloid without products exactly; a product moves the optimum."""
    is_chosen = (np.array(POINTS) == centre).any(axis=1)
    points = np.array(POINTS)[is_chosen].tolist()
    z = np.log(np.array(points) / BEST)
    upright = 3.5 + 0.05 * z[:, 0] ** 2 + 0.03 * z[:, 1] ** 2
    found = fit_optimum(points, upright[:, None] + np.array([0.0, 0.3]))
    assert found.values == pytest.approx(BEST, rel=1e-9) and not found.why_not
    alone = fit_optimum(points, upright[:, None])
    assert np.isnan([alone.se, *alone.errors]).all()
    tilted = fit_optimum(points, losses()[is_chosen, None])
    assert tilted.values != pytest.approx(BEST, rel=1e-2) and not tilted.why_not


def saddle() -> np.ndarray:
    z = np.log(np.array(POINTS) / BEST)
    found = 3.5 + 0.05 * z[:, 0] ** 2 + 0.001 * z[:, 1] ** 2 + 0.05 * z[:, 0] * z[:, 1]
    found[POINTS.index((0.006, 0.02))] = found.min() - 0.001
    return found


#: a reason for no fit -> points, their losses, and the planned points
NO_MINIMUM: dict[str, tuple[list[tuple[float, float]], np.ndarray, list[tuple[float, float]]]] = {
    "lowest at the largest rate": (POINTS[:6], losses()[:6], []),
    "lowest at the smallest std": (
        [p for p in POINTS if p[1] != 0.01],
        losses()[[i for i in range(12) if i % 3]],
        [],
    ),
    "lowest next to rates that diverged": (
        [(0.01, std) for std in (0.03, 0.06, 0.12)],
        np.array([6.05, 6.0, 6.05]),
        list(product((0.01, 0.05), (0.03, 0.06, 0.12))),
    ),
    "neighbours above the cliff": (POINTS, losses(cliff=0.006), []),
    "too few neighbours": ([POINTS[i] for i in (0, 1, 4, 5, 7)], losses()[[0, 1, 4, 5, 7]], []),
    "a saddle": (POINTS, saddle(), []),
}


@pytest.mark.parametrize("name", NO_MINIMUM)
def test_fit_optimum_without_a_minimum_is_the_lowest_point(name: str) -> None:
    points, y, planned = NO_MINIMUM[name]
    found = fit_optimum(points, y[:, None], planned)
    assert found.why_not and np.isnan([found.se, *found.errors]).all()
    assert (found.values, found.loss) == (points[int(y.argmin())], y.min())


def test_fit_optimum_leaves_out_a_point_above_the_cliff() -> None:
    y = losses()
    y[POINTS.index((0.012, 0.04))] = y.min() + 0.2
    assert fit_optimum(POINTS, y[:, None]).values == pytest.approx(BEST, rel=1e-9)


def test_fit_optimum_nearly_flat_losses_have_a_minimum() -> None:
    found = fit_optimum([(1.0,), (2.0,), (4.0,), (8.0,)], [[3.0], [3.0 - 1e-9], [3.0], [3.2]])
    assert found.values[0] == pytest.approx(2.0) and not found.why_not


@pytest.mark.parametrize(("step", "is_near"), [(2.0, True), (3.9, True), (10.0, False)])
def test_fit_optimum_minimum_far_from_all_runs_refused(step: float, is_near: bool) -> None:
    """It is half a step from the next run, in logarithms: a factor of two at a step of four."""
    best = 0.01 * step**0.499

    def fit(rates: list[float]) -> Optimum:
        losses = [[3 + math.log(rate / best) ** 2 / 1000] for rate in rates]
        return fit_optimum([(rate,) for rate in rates], losses)

    rates = [0.01 / step, 0.01, 0.01 * step]
    found = fit(rates)
    assert found.values[0] == pytest.approx(best if is_near else 0.01)
    assert (found.why_not == "") == is_near
    assert not fit([*rates, best * 1.1]).why_not


@pytest.mark.parametrize(
    ("points", "losses", "key"),
    [
        ([(1.0,), (2.0,), (4.0,)], [[math.nan], [2.9], [2.95]], "a loss"),
        ([(0.0,), (2.0,), (4.0,)], [[3.0], [2.9], [2.95]], "a value of an axis"),
    ],
)
def test_fit_optimum_of_no_numbers_refused(
    points: list[tuple[float]], losses: list[list[float]], key: str
) -> None:
    with pytest.raises(ConfigError, match=key):
        fit_optimum(points, losses)


def test_fit_optimum_errors_equal_repeated_experiments() -> None:
    """300 grids: the standard errors stated are the scatter found; that of a standard deviation of
    300 is 4%."""
    rng = np.random.default_rng(0)
    optima = []
    errors = []
    for _ in range(300):
        found = fit_optimum(POINTS, losses()[:, None] + rng.normal(0, 0.002, (12, 3)))
        optima.append((*np.log(found.values), found.loss))
        errors.append((*found.errors, found.se))
    stated = np.sqrt(np.mean(np.square(errors), axis=0))
    assert np.std(optima, axis=0) == pytest.approx(stated, rel=0.15)
    assert np.mean(optima, axis=0)[2] == pytest.approx(3.5, abs=3 * stated[2] / math.sqrt(300))
