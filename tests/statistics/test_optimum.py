"""Optima of grids, on paraboloids with a known minimum and with simulated noise."""

import math

import numpy as np
import pytest

from lightning_sv.statistics.optimum import fit_optimum

RATES, STDS = (0.003, 0.006, 0.012, 0.024), (0.01, 0.02, 0.04)
POINTS = [(lr, std) for lr in RATES for std in STDS]
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
    assert (
        one.values == pytest.approx((BEST[0] * math.exp(-0.2 * z), 0.02)) and one.errors[1] == 0.0
    )


def test_fit_optimum_cross_has_no_products() -> None:
    """Five points determine a paraboloid without products exactly; a product moves the optimum."""
    for centre in ((0.006, 0.02), (0.012, 0.02)):
        chosen = [i for i, p in enumerate(POINTS) if p[0] == centre[0] or p[1] == centre[1]]
        points = [POINTS[i] for i in chosen]
        z = np.log(np.array(points) / BEST)
        upright = 3.5 + 0.05 * z[:, 0] ** 2 + 0.03 * z[:, 1] ** 2
        found = fit_optimum(points, upright[:, None] + np.array([0.0, 0.3]))
        assert found.values == pytest.approx(BEST, rel=1e-9) and not found.why_not
        alone = fit_optimum(points, upright[:, None])
        assert alone.values == pytest.approx(BEST, rel=1e-9) and alone.se is None
        assert np.isnan(alone.errors).all()
        tilted = fit_optimum(points, losses()[chosen, None])
        assert tilted.values != pytest.approx(BEST, rel=1e-2) and not tilted.why_not


def saddle() -> np.ndarray:
    z = np.log(np.array(POINTS) / BEST)
    found = 3.5 + 0.05 * z[:, 0] ** 2 + 0.001 * z[:, 1] ** 2 + 0.05 * z[:, 0] * z[:, 1]
    found[POINTS.index((0.006, 0.02))] = found.min() - 0.001
    return found


WIDE = [(lr, std) for lr in (0.001, 0.01, 0.1) for std in (0.01, 0.02, 0.04)]
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
        [(rate, std) for rate in (0.01, 0.05) for std in (0.03, 0.06, 0.12)],
    ),
    "neighbours above the cliff": (POINTS, losses(cliff=0.006), []),
    "too few neighbours": ([POINTS[i] for i in (0, 1, 4, 5, 7)], losses()[[0, 1, 4, 5, 7]], []),
    "a saddle": (POINTS, saddle(), []),
    "a minimum far from all runs": (
        WIDE,
        3 + (np.log(np.array(WIDE) / (0.03, 0.02)) ** 2).sum(axis=1) / 1000,
        [],
    ),
}


@pytest.mark.parametrize("name", NO_MINIMUM)
def test_fit_optimum_without_a_minimum_is_the_lowest_point(name: str) -> None:
    points, y, planned = NO_MINIMUM[name]
    found = fit_optimum(points, y[:, None], planned)
    assert found.why_not and found.se is None and all(math.isnan(error) for error in found.errors)
    assert (found.values, found.loss) == (points[int(y.argmin())], y.min())


def test_fit_optimum_leaves_out_a_point_above_the_cliff() -> None:
    y = losses()
    y[POINTS.index((0.012, 0.04))] = y.min() + 0.2
    assert fit_optimum(POINTS, y[:, None]).values == pytest.approx(BEST, rel=1e-9)


def test_fit_optimum_nearly_flat_losses_have_a_minimum() -> None:
    found = fit_optimum([(1.0,), (2.0,), (4.0,), (8.0,)], [[3.0], [3.0 - 1e-9], [3.0], [3.2]])
    assert found.values[0] == pytest.approx(2.0) and not found.why_not


@pytest.mark.parametrize("step", [2.0, 3.9, 10.0, 100.0])
def test_fit_optimum_minimum_far_from_all_runs_refused(step: float) -> None:
    """Half a step from the next run, in logarithms: more than a factor of two for steps above
    four."""
    rates = [0.01 / step, 0.01, 0.01 * step]
    best = 0.01 * step**0.499
    found = fit_optimum(
        [(x,) for x in rates], [[3 + math.log(x / best) ** 2 / 1000] for x in rates]
    )
    assert found.values[0] == pytest.approx(0.01 if step > 4 else best)
    assert bool(found.why_not) == (step > 4)
    nearer = [*rates, best * 1.1] if step > 4 else rates
    assert not fit_optimum(
        [(x,) for x in nearer], [[3 + math.log(x / best) ** 2 / 1000] for x in nearer]
    ).why_not


def test_fit_optimum_errors_equal_repeated_experiments() -> None:
    """300 grids: the standard errors stated are the scatter found; that of a standard deviation of
    300 is 4%."""
    rng, sd, n = np.random.default_rng(0), 0.002, 300
    found = [fit_optimum(POINTS, losses()[:, None] + rng.normal(0, sd, (12, 3))) for _ in range(n)]
    assert not any(each.why_not for each in found)
    stated = np.sqrt(np.mean(np.square([(*each.errors, each.se) for each in found]), axis=0))
    scatter = np.std([(*np.log(each.values), each.loss) for each in found], axis=0)
    assert scatter == pytest.approx(stated, rel=0.15)
    assert np.mean([each.loss for each in found]) == pytest.approx(
        3.5, abs=3 * stated[2] / math.sqrt(n)
    )
