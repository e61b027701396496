"""Scaling fits against constructed laws, closed forms and the coverage of their intervals."""

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_sv.errors import NotTestableError
from lightning_sv.statistics.scaling import Form, Law, _fit_law, _shifts, fit_scaling

SIZES = np.array([1e5, 3e5, 1e6, 3e6, 1e7])
A = Law("power", 20.0, 0.20, 2.0)
B = Law("power", 21.0, 0.21, 2.0)
LINE_A = Law("log-linear", 0.0, 0.25, 6.5)
LINE_B = Law("log-linear", 0.0, 0.26, 6.6)


def noisy(a: Law, b: Law, rng: np.random.Generator, seeds: int = 3) -> tuple[NDArray, NDArray]:
    """Losses of pairs: the seed's share is five times what differs within a pair."""
    shared = rng.normal(0, 0.02, (len(SIZES), seeds))
    own = rng.normal(0, 0.004, (2, len(SIZES), seeds))
    return a(SIZES)[:, None] + shared + own[0], b(SIZES)[:, None] + shared + own[1]


@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_fit_scaling_power_law_is_recovered(scale: float) -> None:
    """All five parameters of noiseless laws, in any unit of size; the offset and slope are
    theirs."""
    fit = fit_scaling(list(SIZES * scale), A(SIZES)[:, None], B(SIZES)[:, None])[0]
    assert fit.form == "power" and fit.residual < 1e-9
    for found, law in ((fit.a, A), (fit.b, B)):
        want = (law.scale * scale**law.slope, law.slope, law.floor)
        assert (found.scale, found.slope, found.floor) == pytest.approx(want, rel=1e-5)
    middle = np.exp(np.log(SIZES).mean())
    assert fit.offset.mean == pytest.approx(float(B(middle) - A(middle)), abs=1e-8)
    assert fit.slope.mean == pytest.approx(0.01, abs=1e-6)
    assert not fit.offset.has_interval  # one seed has no interval


def test_fit_scaling_line_equals_the_normal_equations() -> None:
    """The log-linear fit against numpy's least squares on all points at once."""
    a, b = noisy(LINE_A, LINE_B, np.random.default_rng(1))
    fit = fit_scaling(list(SIZES), a, b, resamples=20)[1]
    design = np.stack([np.ones(15), -np.log(np.repeat(SIZES, 3))], axis=1)
    for law, losses in ((fit.a, a), (fit.b, b)):
        u, s = np.linalg.lstsq(design, losses.ravel(), rcond=None)[0]
        assert (law.floor, law.slope) == pytest.approx((u, s))
    assert fit.offset.mean == pytest.approx(b.mean() - a.mean())
    assert "ln N" in fit.a.formula() and "N^-" in A.formula()


@pytest.mark.parametrize(
    ("form", "trials"), [("log-linear", 150), pytest.param("power", 60, marks=pytest.mark.long)]
)
def test_fit_scaling_interval_covers_the_truth(form: Form, trials: int) -> None:
    """The share of 95% intervals of three pairs a size that hold the true offset and slope."""
    a, b = {"power": (A, B), "log-linear": (LINE_A, LINE_B)}[form]
    rng = np.random.default_rng(0)
    middle = np.exp(np.log(SIZES).mean())
    truth = np.array([float(b(middle) - a(middle)), b.slope - a.slope])
    hits = np.zeros(2)
    for trial in range(trials):
        losses = np.stack(noisy(a, b, rng))
        fit = _fit_law(form, SIZES, losses, _shifts(losses, 100, trial))
        low = np.array([fit.offset.low, fit.slope.low])
        high = np.array([fit.offset.high, fit.slope.high])
        hits += (low <= truth) & (truth <= high)
    assert (np.abs(hits / trials - 0.95) < 0.08).all(), hits / trials


@pytest.mark.long
def test_fit_scaling_shared_offsets_of_pairs_cancel() -> None:
    """Paired resamples: an offset half as large as the scatter between seeds is resolved."""
    a, b = noisy(A, Law("power", 20.0, 0.201, 2.0), np.random.default_rng(3))
    fit = fit_scaling(list(SIZES), a, b)[0]
    assert fit.offset.high < 0
    shuffled = fit_scaling(list(SIZES), a, np.roll(b, 1, axis=1))[0]
    assert shuffled.offset.high - shuffled.offset.low > 2 * (fit.offset.high - fit.offset.low)


def test_fit_scaling_few_sizes_have_fewer_laws() -> None:
    a, b = noisy(A, B, np.random.default_rng(0))
    for sizes, forms in ((3, ["power", "log-linear"]), (2, ["log-linear"])):
        fits = fit_scaling(list(SIZES[:sizes]), a[:sizes], b[:sizes], resamples=20)
        assert [fit.form for fit in fits] == forms
    with pytest.raises(NotTestableError):
        fit_scaling([1e6], a[:1], b[:1])
    with pytest.raises(NotTestableError):
        fit_scaling(list(SIZES), a * np.nan, b)
