"""Differences to the baselines of panels: differences.csv."""

from collections.abc import Iterator, Sequence
from math import nan
from typing import Any

import pandas as pd

from lightning_sv.experiments.kinds.base import LoadedPanel
from lightning_sv.experiments.kinds.scaling import laws
from lightning_sv.experiments.pairs import Pair
from lightning_sv.experiments.report.copying import measured, parts_of
from lightning_sv.experiments.results import Figure, panels_of
from lightning_sv.statistics.paired import PairedDifference

COLUMNS = [
    "figure", "panel", "arm", "baseline", "quantity", "n", "estimate", "low", "high",
    "own_low", "own_high",
]  # fmt: skip
#: columns of the interval by the scatter of the pairs alone, if there is none
NO_OWN = (nan, nan)
Row = tuple[Any, ...]


def difference_frame(figures: Sequence[Figure]) -> pd.DataFrame:
    """Return a row per difference: of losses, in tokens, by kind of token, of laws of series."""
    rows = []
    for figure, panel in panels_of(figures):
        differences = (*_losses(panel), *_token_factors(panel), *_parts(panel), *_laws(panel))
        rows += [(figure.spec.name, panel.title, *row) for row in differences]
    if not rows:
        return pd.DataFrame()
    return pd.DataFrame(rows, columns=COLUMNS, dtype=object)


def _losses(panel: LoadedPanel) -> Iterator[Row]:
    for pair in panel.pairs:
        yield _row(pair, "final loss", pair.difference)


def _token_factors(panel: LoadedPanel) -> Iterator[Row]:
    for pair in panel.pairs:
        e = pair.efficiency
        if e.has_factor:
            interval = (e.low, e.high)
            yield (pair.b.label, pair.a.label, "token factor", e.n, e.factor, *interval, *NO_OWN)


def _parts(panel: LoadedPanel) -> Iterator[Row]:
    for pair in panel.pairs:
        if measured((pair.a, pair.b)):
            for kind, part in parts_of(pair.a, pair.b).items():
                yield _row(pair, f"final loss, part of {kind}", part)


def _row(pair: Pair, quantity: str, d: PairedDifference) -> Row:
    return (pair.b.label, pair.a.label, quantity, d.n, d.mean, d.low, d.high, *d.own_interval)


def _laws(panel: LoadedPanel) -> Iterator[Row]:
    for series, baseline, fit in laws(panel):
        for name, d in (("offset", fit.offset), ("slope", fit.slope)):
            quantity = f"{name}, {fit.form} law"
            yield (series.label, baseline.label, quantity, None, d.mean, d.low, d.high, *NO_OWN)
