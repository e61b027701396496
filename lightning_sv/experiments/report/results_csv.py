"""results.csv of a report, one row per run: written with the report, and read as recorded runs.

The name of a run directory has a hash of everything that determines the run, so a row identifies it
on any machine, and replaces a directory that does not exist there. A row has validation losses,
copying measurements, the scalars that its panel, its kind and its claims name, the share of clipped
steps and provenance, but no other scalars and no config.
"""

import csv
import logging
import os
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
from lightning_sv.experiments.results import Figure, panels_of, tokens_per_param
from lightning_sv.runs.directory import SUMMARY_TYPES, printable
from lightning_sv.runs.events import LATE_TRAIN_LOSS, Curve, Run, contradiction
from lightning_sv.runs.tags import COPYING, VAL_LOSS

log = logging.getLogger(__name__)

#: file of a report with one row per run
RESULTS = "results.csv"
csv.field_size_limit(2**31 - 1)  # a curve of many validations is one cell
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
        tags = {*panel.kind.scalars, panel.spec.tag}
        tags.update(*(claim.tags for claim in panel.spec.claims))
        for arm in panel.all_arms:
            for run in (*arm.runs, *arm.diverged):
                rows.append(place | _run_cells(arm, run, out) | _curve_cells(run, tags))
    return pd.DataFrame(rows, dtype=object)


def _curve_cells(run: Run, tags: Collection[str]) -> dict[str, str]:
    """Return the curves of a run other than its validation loss, by tag."""
    cells = {}
    for tag in sorted(run.curves):
        if tag in tags or tag.startswith(COPYING):
            cells[tag] = curve_text(run.curves[tag])
    return cells


def _run_cells(arm: Arm, run: Run, out: Path) -> dict[str, Any]:
    """Return the cells of one run, by column."""
    cells = {
        "arm": arm.label,
        "ours": arm.ours,
        "baseline": arm.baseline,
        "seed": run.summary.get("seed"),
        "tokens": run.tokens,
        "tokens_per_param": tokens_per_param(run),
        "epochs": run.summary.get("epochs"),
        "val_loss": "nan" if isnan(run.val_loss) else run.val_loss,  # nan alone is an empty cell
        LATE_TRAIN_LOSS: run.late_train_loss,
    }
    share = clipped_share(run)
    if share is not None:  # so that no column is empty
        cells[CLIPPED] = share
    for key in _SUMMARY:
        cells[key] = run.summary.get(key)
    cells["run"] = os.path.relpath(run.dir, out)
    cells["curve"] = curve_text(run.curve(VAL_LOSS))
    return cells


def clipped_share(run: Run) -> float | None:
    """Return the share of clipped steps, its mean over training; None if it is unknown."""
    if CLIPPED in run.curves:
        return float(run.curves[CLIPPED].values.mean())
    recorded = run.summary.get(CLIPPED)
    if recorded is None:
        return None
    return float(recorded)


def write_csv(path: Path, frame: pd.DataFrame) -> None:
    """Write a frame without its index."""
    with atomic_path(path) as partial:
        frame.to_csv(partial, index=False, lineterminator="\n")


def curve_text(curve: Curve) -> str:
    """Return a curve as `tokens:value tokens:value`.

    Nine digits preserve the float32 of event files.
    """
    return " ".join(f"{at}:{value:.9g}" for at, value in zip(*curve, strict=True))


# Reading


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield line number and row of a CSV file, as column -> text; none if the file is empty.

    Raises:
        ConfigError: a line has more or fewer cells than the header, or quotes do not match
    """
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for row in reader:
                # a line that is cut off; its run would count with a part of its curve
                is_complete = None not in row and None not in row.values()
                if not is_complete:
                    found = f"{path}, line {reader.line_num}, has not the cells of the header"
                    raise ConfigError(f"{found}; restore the file.")
                yield reader.line_num, row
        except csv.Error as error:
            found = f"{path} is damaged after line {reader.line_num} ({error})"
            raise ConfigError(f"{found}; restore the file.") from error


def read_recorded(paths: Sequence[Path], corpus_hash: str | None = None) -> dict[str, Run]:
    """Return the runs in results.csv files, or in their folders, by directory name.

    The first of equal names counts. Further rows of the same loss, which are those of other panels,
    add the scalars that these panels name.
    """
    recorded: dict[str, Run] = {}
    for given in paths:
        path = given
        if not given.is_file():
            path /= RESULTS
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
    for line, row in read_rows(path):
        yield _run(row, f"--results_from: {path}, line {line}")


def _check_corpus(path: Path, run: Run, corpus_hash: str | None) -> None:
    recorded = run.summary["corpus_hash"]
    if corpus_hash not in (None, recorded):
        key = f"--results_from: the corpus of {path}"
        expected = f"{str(corpus_hash)[:12]}, the current one. Omit this recording."
        raise ConfigError(f"{key} is {recorded[:12]}; expected {expected}")


def _run(row: Mapping[str, str], where: str) -> Run:
    """Return a row as a run without config."""
    cells = {key: text for key, text in printable(dict(row)).items() if text}
    needed = set(_NEEDED)
    if cells.get("val_loss") == "nan":  # a diverged run has no summary with a tokenizer
        needed.remove("tokenizer_sha256")
    lacking = needed - cells.keys()
    if lacking:
        raise ConfigError(f"{where}: it has no {', '.join(sorted(lacking))}.")
    try:
        summary, curves = _summary_and_curves(cells)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where}: it is not a row of a report ({error!r}).") from error
    run = Run(Path(cells["run"]), cells["arm"], {}, summary, curves, recorded=True)
    fault = contradiction(run)
    if fault is not None:
        raise ConfigError(f"{where}: {fault}.")
    return run


def _summary_and_curves(cells: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Curve]]:
    """Return the cells of a row as values of their types, and those with curves by tag."""
    types = SUMMARY_TYPES | {LATE_TRAIN_LOSS: float}
    only_last = f"{cells['tokens']}:{cells['val_loss']}"  # of a report without curves
    curves = {VAL_LOSS: read_curve(cells.get("curve", only_last))}
    summary = {}
    for column, text in cells.items():
        if column == "curve":
            continue
        if column not in _TEXTS and ":" in text:  # the mean of a scalar is a single number
            curves[column] = read_curve(text)
        else:
            summary[column] = types.get(column, str)(text)
    return summary, curves


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
