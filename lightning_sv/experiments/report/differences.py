"""Differences to the baselines of panels: differences.csv."""

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from lightning_sv.experiments.kinds.base import LoadedPanel
from lightning_sv.experiments.kinds.scaling import laws
from lightning_sv.experiments.report.copying import measured, parts_of
from lightning_sv.experiments.results import Figure

COLUMNS = [
    "figure", "panel", "arm", "baseline", "quantity", "n", "estimate", "low", "high", "own_low", "own_high",
]  # fmt: skip
Row = tuple[Any, ...]


def difference_frame(figures: Sequence[Figure]) -> pd.DataFrame:
    """Return one row per difference: of final losses, in tokens, by kind of token, and of the laws of series."""
    rows = []
    for figure in figures:
        for panel in figure.panels:
            differences = (*_losses(panel), *_token_factors(panel), *_parts(panel), *_laws(panel))
            rows += [(figure.spec.name, panel.title, *row) for row in differences]
    return pd.DataFrame(rows, columns=COLUMNS if rows else None, dtype=object)


def _losses(panel: LoadedPanel) -> Iterator[Row]:
    for pair in panel.pairs:
        d = pair.difference
        own = (d.alone.low, d.alone.high) if d.alone else (None, None)
        yield (pair.b.label, pair.a.label, "final loss", d.n, d.mean, d.low, d.high, *own)


def _token_factors(panel: LoadedPanel) -> Iterator[Row]:
    for pair in panel.pairs:
        e = pair.efficiency
        if e.factor is not None:
            yield (pair.b.label, pair.a.label, "token factor", e.n, e.factor, e.low, e.high, None, None)


def _parts(panel: LoadedPanel) -> Iterator[Row]:
    for pair in panel.pairs:
        if not measured((pair.a, pair.b)):
            continue
        for kind, d in parts_of(pair.a, pair.b).items():
            quantity = f"final loss, part of {kind}"
            yield (pair.b.label, pair.a.label, quantity, d.n, d.mean, d.low, d.high, None, None)


def _laws(panel: LoadedPanel) -> Iterator[Row]:
    for series, against, fit in laws(panel):
        for name, d in (("offset", fit.offset), ("slope", fit.slope)):
            quantity = f"{name}, {fit.form} law"
            yield (series.label, against.label, quantity, None, d.mean, d.low, d.high, None, None)
