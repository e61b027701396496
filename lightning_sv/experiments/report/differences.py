"""Differences to the baseline of a panel, one row each."""

from collections.abc import Iterator
from typing import Any

from lightning_sv.experiments.kinds.base import LoadedPanel
from lightning_sv.experiments.kinds.scaling import laws
from lightning_sv.experiments.report.copying import measured, parts_of

#: columns of differences.csv after `figure` and `panel`
DIFFERENCE = ("arm", "baseline", "quantity", "n", "estimate", "low", "high", "own_low", "own_high")
Row = tuple[Any, ...]


def differences_of(panel: LoadedPanel) -> list[Row]:
    """Return one row per difference: of final losses, in tokens, by kind of token, and of the laws of series."""
    return [*_losses(panel), *_token_factors(panel), *_parts(panel), *_laws(panel)]


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
