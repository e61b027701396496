"""Recorded runs: rows of results.csv replace run directories that do not exist here.

The name of a run directory has a hash of everything that determines the run, so a row identifies it on any machine.
A row has validation losses, copying measurements and their provenance, but no other scalars and no config.
"""

import csv
import logging
from collections.abc import Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np

from lightning_sv.errors import ConfigError, expect
from lightning_sv.runs.directory import SUMMARY_TYPES, printable
from lightning_sv.runs.events import COPYING, LATE_TRAIN_LOSS, VAL_LOSS, Curve, Run, contradiction

log = logging.getLogger(__name__)

#: file of a report with one row per run
RESULTS = "results.csv"
csv.field_size_limit(2**31 - 1)  # a curve of many validations is one cell
#: starts of the formulas of spreadsheets
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_NEEDED = ("run", "arm", "seed", "tokens", "val_loss", "corpus_hash", "tokenizer_sha256")


def read_csv(path: Path) -> tuple[tuple[str, ...], dict[int, dict[str, str]]]:
    """Return the columns of a CSV file, and line -> row; raise ConfigError for a damaged line."""
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        reader, rows = csv.DictReader(file), dict[int, dict[str, str]]()
        for row in reader:
            rows[reader.line_num] = row
        columns = tuple(reader.fieldnames or ())
    for line, row in rows.items():
        if None in row or None in row.values():  # csv marks too many or too few cells this way
            raise ConfigError(f"{path}, line {line}: the number of cells differs from the header; restore the file.")
    return columns, {line: {key: _cell_text(cell) for key, cell in row.items()} for line, row in rows.items()}


def plain_cell(value: Any) -> Any:
    """Return a value for a cell; a text that spreadsheets would take for a formula begins with an apostrophe.

    >>> plain_cell("=1+1"), plain_cell("llama"), plain_cell(-0.5)
    ("'=1+1", 'llama', -0.5)
    """
    is_formula = isinstance(value, str) and value.lstrip("'").startswith(_FORMULA)
    return f"'{value}" if is_formula else value


def _cell_text(cell: str) -> str:
    """Return the text of a cell from `plain_cell`."""
    return cell[1:] if cell.startswith("'") and cell.lstrip("'").startswith(_FORMULA) else cell


def read_recorded(paths: Sequence[Path], corpus_hash: str | None = None) -> dict[str, Run]:
    """Return the runs in results.csv files, or in their folders, by directory name; the first of equal names counts."""
    found: dict[str, Run] = {}
    for given in paths:
        path = given if given.is_file() else given / RESULTS
        wanted = "the folder of a report, e.g. results/cpu."
        expect(path.is_file(), "--results_from", f"{path}, which does not exist", wanted)
        columns, rows = read_csv(path)
        if lacking := [name for name in _NEEDED if name not in columns]:
            raise ConfigError(f"--results_from: {path} has no column {lacking[0]}; expected a report of this version.")
        for line, row in rows.items():
            run = _run(row, f"--results_from: {path}, line {line}")
            corpus = run.summary["corpus_hash"]
            wanted = f"{str(corpus_hash)[:12]}, the current one. Omit this recording."
            expect(corpus_hash in (None, corpus), f"--results_from: the corpus of {path}", corpus[:12], wanted)
            loss, other = run.val_loss, found.setdefault(run.dir.name, run).val_loss
            if not np.array_equal(loss, other, equal_nan=True):
                log.warning("%s: the loss of %s is %.4f; an earlier recording counts: %.4f", path, run.dir, loss, other)
    return found


def _run(row: Mapping[str, str], where: str) -> Run:
    """Return a row as a run without config."""
    try:
        types = SUMMARY_TYPES | {LATE_TRAIN_LOSS: float}
        summary = {key: types.get(key, str)(text) for key, text in printable(dict(row)).items() if text}
        diverged = isnan(summary.get("val_loss", 0.0))  # it has no summary with a tokenizer
        lacking = [name for name in _NEEDED[: -1 if diverged else None] if name not in summary]
        losses = read_curve(summary.pop("curve", f"{summary['tokens']}:{summary['val_loss']}"))
        copying = {tag: read_curve(summary.pop(tag)) for tag in list(summary) if tag.startswith(COPYING)}
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(f"{where}: it is not a row of a report ({error!r}).") from error
    if lacking:
        raise ConfigError(f"{where}: it has no {lacking[0]}.")
    run = Run(Path(summary["run"]), summary["arm"], {}, summary, {VAL_LOSS: losses, **copying}, recorded=True)
    if why := contradiction(run):
        raise ConfigError(f"{where}: {why}.")
    return run


def curve_text(curve: Curve) -> str:
    """Return a curve as `tokens:value tokens:value`; nine digits preserve the float32 of event files."""
    return " ".join(f"{at}:{value:.9g}" for at, value in zip(*curve, strict=True))


def read_curve(text: str) -> Curve:
    """Return the curve of a text from `curve_text`."""
    points = [point.split(":") for point in text.split()]
    values = np.array([float(value) for _, value in points], dtype=np.float32)
    return Curve(np.array([int(at) for at, _ in points], dtype=np.int64), values.astype(np.float64))
