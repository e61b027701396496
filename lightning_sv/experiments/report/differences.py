"""Differences to the baselines of panels: differences.csv."""

from collections.abc import Iterator, Sequence

import pandas as pd

from lightning_sv.experiments.arms import Arm, Series
from lightning_sv.experiments.kinds.base import LoadedPanel
from lightning_sv.experiments.report.copying import measured_copying, parts_of
from lightning_sv.experiments.results import Figure, panels_of
from lightning_sv.statistics.paired import PairedDifference

COLUMNS = [
    "figure", "panel", "arm", "baseline", "quantity", "n", "estimate", "low", "high",
    "own_low", "own_high",
]  # fmt: skip
#: column -> value; an unknown value is absent
Row = dict[str, object]


def difference_frame(figures: Sequence[Figure]) -> pd.DataFrame:
    """Return a row per difference: of losses, in tokens, by kind of token, and against size."""
    rows: list[Row] = []
    for figure, panel in panels_of(figures):
        place = {"figure": figure.spec.name, "panel": panel.title}
        for row in (*_losses(panel), *_token_factors(panel), *_parts(panel), *_lines(panel)):
            rows.append(place | row)
    if not rows:
        return pd.DataFrame()
    return pd.DataFrame(rows, columns=COLUMNS, dtype=object)


def _losses(panel: LoadedPanel) -> Iterator[Row]:
    for pair in panel.pairs:
        yield _row(pair.a, pair.b, "final loss", pair.difference)


def _token_factors(panel: LoadedPanel) -> Iterator[Row]:
    for pair in panel.pairs:
        e = pair.efficiency
        if e.has_factor:
            numbers = {"n": e.n, "estimate": e.factor, "low": e.low, "high": e.high}
            yield _names(pair.a, pair.b, "token factor") | numbers


def _parts(panel: LoadedPanel) -> Iterator[Row]:
    for pair in panel.pairs:
        if not measured_copying((pair.a, pair.b)):
            continue
        for kind, part in parts_of(pair.a, pair.b).items():
            yield _row(pair.a, pair.b, f"final loss, part of {kind}", part)


def _lines(panel: LoadedPanel) -> Iterator[Row]:
    for series, line in panel.kind.lines(panel):
        assert panel.baseline is not None  # the lines are those of differences to it
        yield _row(panel.baseline, series, "offset at the geometric mean size", line.offset)
        yield _row(panel.baseline, series, "slope per e-fold of size", line.slope)


def _row(a: Arm | Series, b: Arm | Series, quantity: str, d: PairedDifference) -> Row:
    own_low, own_high = d.own_interval
    return _names(a, b, quantity) | {
        "n": d.n,
        "estimate": d.mean,
        "low": d.low,
        "high": d.high,
        "own_low": own_low,
        "own_high": own_high,
    }


def _names(a: Arm | Series, b: Arm | Series, quantity: str) -> Row:
    return {"arm": b.label, "baseline": a.label, "quantity": quantity}
