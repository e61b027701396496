"""results.csv of a report, one row per run: written with the report, and read as recorded runs.

The name of a run directory has a hash of everything that determines the run, so a row identifies it
on any machine, and replaces a directory that does not exist there. A row has validation losses,
copying measurements, the scalars that its panel and its claims name, the share of clipped steps
and provenance, but no other scalars and no config.
"""

import csv
import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lightning_sv.atomic import atomic_path
from lightning_sv.errors import ConfigError
from lightning_sv.experiments.arms import Arm
from lightning_sv.experiments.results import Figure, panels_of
from lightning_sv.experiments.spec import PanelSpec
from lightning_sv.runs.directory import SUMMARY_TYPES, printable
from lightning_sv.runs.events import LATE_TRAIN_LOSS, Curve, Run, contradiction
from lightning_sv.runs.tags import COPYING, VAL_LOSS

log = logging.getLogger(__name__)

#: file of a report with one row per run
RESULTS = "results.csv"
csv.field_size_limit(2**31 - 1)  # a curve of many validations is one cell
#: start of a formula of a spreadsheet, also after apostrophes
_FORMULA = r"(?='*[-=+@\t\r])"
#: columns with values of the summary
_SUMMARY = (
    "steps", "parameters", "activated_parameters", "lr", "seconds", "corpus_hash",
    "tokenizer_sha256", "torch", "commit", "date", "machine",
)  # fmt: skip
#: columns with texts of any content
_TEXTS = ("figure", "panel", "kind", "arm", "run", *_SUMMARY)
#: tag of `TrainingMonitor` whose mean over a run has a column
CLIPPED = "clipped_steps"
_NEEDED = ("run", "arm", "seed", "tokens", "val_loss", "corpus_hash", "tokenizer_sha256")


# Writing


def run_frame(figures: Sequence[Figure], out: Path) -> pd.DataFrame:
    """Return one row per run of each panel, also without a pair or diverged.

    Copying and the named scalars have one column per tag. Run directories are relative
    to `out`, the folder of the report, so that a report in a different folder has equal rows.
    """
    rows = []
    for figure, panel in panels_of(figures):
        place = {"figure": figure.spec.name, "panel": panel.title, "kind": panel.spec.kind}
        tags = _named_tags(panel.spec)
        for arm in panel.all_arms:
            for run in (*arm.runs, *arm.diverged):
                rows.append(place | _run_cells(arm, run, out) | _curve_cells(run, tags))
    return pd.DataFrame(rows, dtype=object)


def _named_tags(panel: PanelSpec) -> set[str]:
    """Return the scalars that a panel and its claims name."""
    tags: set[str] = set()
    if panel.tag:
        tags.add(panel.tag)
    for claim in panel.claims:
        tags.update(claim.tags)
    return tags


def _curve_cells(run: Run, tags: Collection[str]) -> dict[str, str]:
    """Return the curves of a run other than its validation loss, by tag."""
    cells = {}
    for tag in sorted(run.curves):
        if tag in tags or tag.startswith(COPYING):
            cells[tag] = curve_text(run.curves[tag])
    return cells


def _run_cells(arm: Arm, run: Run, out: Path) -> dict[str, Any]:
    """Return the cells of one run, by column."""
    return {
        "arm": arm.label,
        "ours": arm.ours,
        "baseline": arm.baseline,
        "seed": run.summary.get("seed"),
        "tokens": run.tokens,
        "tokens_per_param": tokens_per_param(run),
        "epochs": run.summary.get("epochs"),
        "val_loss": "nan" if isnan(run.val_loss) else run.val_loss,  # nan alone is an empty cell
        LATE_TRAIN_LOSS: run.late_train_loss,
        **_clipped_cell(run),
        **{key: run.summary.get(key) for key in _SUMMARY},
        "run": os.path.relpath(run.dir, out),
        "curve": curve_text(run.curve(VAL_LOSS)),
    }


def tokens_per_param(run: Run) -> float | None:
    """Return training tokens per activated parameter; None if the summary has no parameters."""
    parameters = run.summary.get("activated_parameters") or run.summary.get("parameters")
    return run.tokens / parameters if parameters else None


def _clipped_cell(run: Run) -> dict[str, float]:
    """Return the share of clipped steps; nothing if it is unknown, so that no column is empty."""
    share = clipped_share(run)
    return {} if share is None else {CLIPPED: share}


def clipped_share(run: Run) -> float | None:
    """Return the share of clipped steps, its mean over training; None if it is unknown."""
    if CLIPPED in run.curves:
        return float(run.curves[CLIPPED].values.mean())
    recorded = run.summary.get(CLIPPED)
    return None if recorded is None else float(recorded)


def write_csv(path: Path, frame: pd.DataFrame) -> None:
    """Write a frame; texts that spreadsheets would take for formulas begin with an apostrophe."""
    plain = frame.replace(f"^{_FORMULA}", "'", regex=True)
    with atomic_path(path) as partial:
        plain.to_csv(partial, index=False, lineterminator="\n")


def curve_text(curve: Curve) -> str:
    """Return a curve as `tokens:value tokens:value`.

    Nine digits preserve the float32 of event files.
    """
    return " ".join(f"{at}:{value:.9g}" for at, value in zip(*curve, strict=True))


# Reading


def read_csv(path: Path) -> tuple[tuple[str, ...], dict[int, dict[str, str]]]:
    """Return the columns of a CSV file, and line -> row.

    Raises:
        ConfigError: the number of cells of a line differs from the header
    """
    rows: dict[int, dict[str, str]] = {}
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        reader = csv.DictReader(file)
        for row in reader:
            line = reader.line_num
            if None in row or None in row.values():  # csv marks too many or too few cells this way
                found = f"{path}, line {line}: the number of cells differs from the header"
                raise ConfigError(f"{found}; restore the file.")
            rows[line] = {key: re.sub(f"^'{_FORMULA}", "", cell) for key, cell in row.items()}
        columns = tuple(reader.fieldnames or ())
    return columns, rows


def read_recorded(paths: Sequence[Path], corpus_hash: str | None = None) -> dict[str, Run]:
    """Return the runs in results.csv files, or in their folders, by directory name.

    The first of equal names counts. Further rows of the same loss, which are those of other panels,
    add the scalars that these panels name.
    """
    recorded: dict[str, Run] = {}
    for given in paths:
        path = given if given.is_file() else given / RESULTS
        for run in _read_report(path):
            _check_corpus(path, run, corpus_hash)
            earlier = recorded.setdefault(run.dir.name, run)
            if np.array_equal(run.val_loss, earlier.val_loss, equal_nan=True):
                recorded[run.dir.name] = replace(earlier, curves={**run.curves, **earlier.curves})
                continue
            found = f"the loss of {run.dir} is {run.val_loss:.4f}"
            counts = f"an earlier recording counts: {earlier.val_loss:.4f}"
            log.warning("%s: %s; %s", path, found, counts)
    return recorded


def _read_report(path: Path) -> Iterator[Run]:
    """Yield the runs of one results.csv file."""
    if not path.is_file():
        expected = "the folder of a report, e.g. results/cpu."
        raise ConfigError(f"--results_from is {path}, which does not exist; expected {expected}")
    columns, rows = read_csv(path)
    for name in _NEEDED:
        if name not in columns:
            found = f"{path} has no column {name}"
            raise ConfigError(f"--results_from: {found}; expected a report of this version.")
    for line, row in rows.items():
        yield _run(row, f"--results_from: {path}, line {line}")


def _check_corpus(path: Path, run: Run, corpus_hash: str | None) -> None:
    recorded = run.summary["corpus_hash"]
    if corpus_hash not in (None, recorded):
        key = f"--results_from: the corpus of {path}"
        expected = f"{str(corpus_hash)[:12]}, the current one. Omit this recording."
        raise ConfigError(f"{key} is {recorded[:12]}; expected {expected}")


def _run(row: Mapping[str, str], where: str) -> Run:
    """Return a row as a run without config."""
    try:
        summary = _summary(row)
        curves = _take_curves(summary)
        missing = _missing(summary)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(f"{where}: it is not a row of a report ({error!r}).") from error
    if missing is not None:
        raise ConfigError(f"{where}: it has no {missing}.")
    run = Run(Path(summary["run"]), summary["arm"], {}, summary, curves, recorded=True)
    fault = contradiction(run)
    if fault is not None:
        raise ConfigError(f"{where}: {fault}.")
    return run


def _summary(row: Mapping[str, str]) -> dict[str, Any]:
    """Return the cells with content, as values of their types."""
    types = SUMMARY_TYPES | {LATE_TRAIN_LOSS: float}
    summary = {}
    for key, text in printable(dict(row)).items():
        if text:
            summary[key] = types.get(key, str)(text)
    return summary


def _take_curves(summary: dict[str, Any]) -> dict[str, Curve]:
    """Remove the cells with curves from a summary, and return the curves by tag."""
    only_last = f"{summary['tokens']}:{summary['val_loss']}"  # of a report without curves
    curves = {VAL_LOSS: read_curve(summary.pop("curve", only_last))}
    columns = [column for column, cell in summary.items() if _is_curve(column, cell)]
    for column in columns:
        curves[column] = read_curve(summary.pop(column))
    return curves


def _is_curve(column: str, cell: object) -> bool:
    """Return True for `tokens:value tokens:value`; the mean of a scalar is a single number."""
    return column not in _TEXTS and ":" in str(cell)


def _missing(summary: Mapping[str, Any]) -> str | None:
    """Return the first needed column without a value."""
    needed = list(_NEEDED)
    if isnan(summary.get("val_loss", 0.0)):  # a diverged run has no summary with a tokenizer
        needed.remove("tokenizer_sha256")
    for name in needed:
        if name not in summary:
            return name
    return None


def read_curve(text: str) -> Curve:
    """Return the curve of a text from `curve_text`."""
    tokens = []
    values = []
    for point in text.split():
        at, value = point.split(":")
        tokens.append(int(at))
        values.append(float(value))
    rounded = np.array(values, dtype=np.float32)  # exactly the values of the event files again
    return Curve(np.array(tokens, dtype=np.int64), rounded.astype(np.float64))
