"""Scaling laws of the series of a panel, each fitted jointly with that of the baseline."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_sv.errors import NotTestableError
from lightning_sv.experiments.arms import Series
from lightning_sv.statistics.scaling import ScalingFit, fit_scaling

#: losses of each size, one per seed, as a key of a cache
_Losses = tuple[tuple[float, ...], ...]


class FittedLaws(NamedTuple):
    """Laws of one form, of a series and of the baseline's series."""

    series: Series
    baseline: Series
    fit: ScalingFit


class LawFits(NamedTuple):
    """Fits of the laws of a panel.

    Attributes:
        fits: series -> its fits with the baseline, one per form
        notes: sentences on the series without
    """

    fits: dict[str, list[ScalingFit]]
    notes: list[str]


def fit_laws(every: Sequence[Series]) -> LawFits:
    """Fit the laws of each series and of the baseline; there are none without a baseline."""
    laws = LawFits({}, [])
    baseline = next((series for series in every if series.baseline), None)
    if baseline is None:
        return laws
    others = [series for series in every if not series.baseline]
    for series in others:
        try:
            laws.fits[series.label] = fit_series(baseline, series)
        except NotTestableError as error:
            laws.notes.append(f"{series.name} has no scaling fit: {error}")
    return laws


def fit_series(baseline: Series, series: Series) -> list[ScalingFit]:
    """Fit the scaling laws of two series, A (the baseline) and B, at the parameters of A.

    Those of B differ a little, because strategies have different numbers of scale vectors.

    Raises:
        NotTestableError: different sizes, fewer than two, or losses that are not finite
    """
    if baseline.sizes != series.sizes:
        sizes = f"{series.sizes} are not the baseline's {baseline.sizes}"
        raise NotTestableError(f"its sizes {sizes}.")
    parameters = tuple(float(value) for value in baseline.values)
    return _fit(parameters, _as_key(baseline.losses), _as_key(series.losses))


# The bootstrap of a fit takes seconds. Table, plots, differences.csv and claims of a panel need the
# same fit, but each of them makes its own series, so the key is the numbers.
@lru_cache(maxsize=100)
def _fit(sizes: tuple[float, ...], a: _Losses, b: _Losses) -> list[ScalingFit]:
    return fit_scaling(sizes, a, b)


def _as_key(losses: NDArray[np.float64]) -> _Losses:
    return tuple(tuple(seeds) for seeds in losses.tolist())
