"""Measured results of a file, or the throughput and memory of runs, without a plot."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lightning_sv.atomic import reading
from lightning_sv.errors import ConfigError
from lightning_sv.experiments.arms import Arm
from lightning_sv.experiments.kinds.base import Drawing, LoadedPanel, PanelKind
from lightning_sv.runs.directory import config_value

_SPEED = "throughput/tokens_per_s"
_MEMORY = "memory/peak_gib"


class TableKind(PanelKind):
    """A table of a file that `make theory` or `make bench` wrote, or of the cost of runs."""

    claims = ("cost", "memory")
    fields = ("file",)
    has_own_pool = True

    def table(self, panel: LoadedPanel) -> pd.DataFrame:
        """Return the measured table as text."""
        return _measured(panel).frame.map(_cell_text)

    def draw(self, panel: LoadedPanel) -> Drawing:
        """Return the note on the source of the table."""
        note = _measured(panel).note
        return Drawing(notes=[note] if note else [])


class MeasuredTable(NamedTuple):
    """Measured content that is not a loss, with a note on its source."""

    frame: pd.DataFrame
    note: str = ""


def _measured(panel: LoadedPanel) -> MeasuredTable:
    """Return the content of the file, or the throughput of the runs."""
    if panel.spec.file:
        return read_table(Path(panel.spec.file))
    return throughput_table(panel.arms)


def _cell_text(cell: str | float) -> str:
    if isinstance(cell, float):
        return f"{cell:.4g}"
    return str(cell)


def read_table(path: Path) -> MeasuredTable:
    """Read results of `make bench`, or those on the claim `or` of `make theory`, Figure 11."""
    with reading(path):
        text = path.read_bytes()
    try:
        content = json.loads(text)
        read = _theory_table if isinstance(content, list) else _bench_table
        table = read(content, path)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        hint = "make theory or make bench writes it."
        raise ConfigError(f"{path} has no figures ({error!r}); {hint}") from error
    if table.frame.empty:
        found = "neither the claim 'or' of make theory nor the strategies of make bench"
        raise ConfigError(f"{path} has {found}.")
    return table


def _theory_table(content: Sequence[dict[str, Any]], path: Path) -> MeasuredTable:
    columns = ["part", "statement", "stated", "measured", "verdict"]
    rows = []
    for row in content:
        if row["claim"] == "or":
            rows.append([row[column] for column in columns])
    frame = pd.DataFrame(rows, columns=columns, dtype=object).map(_eight_digits)
    return MeasuredTable(frame, f"Checked apart from this page by make theory ({path}).")


def _eight_digits(cell: str | float) -> str:
    if isinstance(cell, str):
        return cell
    return f"{cell:.8g}"


def _bench_table(content: dict[str, Any], path: Path) -> MeasuredTable:
    machine = ", ".join(f"{key} {value}" for key, value in content["machine"].items())
    rows = []
    for mode, groups in content.items():
        if not isinstance(groups, dict):
            continue
        for row in groups.get("strategies", ()):
            rows.append(_bench_row(row, mode))
    note = f"Measured apart from this page ({path}): {machine}."
    return MeasuredTable(pd.DataFrame(rows, dtype=object), note)


def _bench_row(row: dict[str, Any], mode: str) -> dict[str, Any]:
    return {
        "strategy": f"{row['name']}, {mode}",
        "ms a step": row["milliseconds"],
        "over llama": row["ratio"],
        "low": row["low"],
        "high": row["high"],
        "pairs": row["pairs"],
    }


def throughput_table(arms: Sequence[Arm]) -> MeasuredTable:
    """Return tokens per second, peak memory and micro-batch of each arm.

    The first two are medians of the second half of each run.
    """
    rows = []
    for arm in arms:
        rows.append(
            {
                "strategy": arm.label,
                "tokens per second": _late_median(arm, _SPEED),
                "peak memory, GiB": _late_median(arm, _MEMORY),
                "micro-batch": config_value(arm.runs[0].config, "data.micro_batch") or "not stated",
                "runs": len(arm.runs),
            }
        )
    return MeasuredTable(pd.DataFrame(rows, dtype=object))


def _late_median(arm: Arm, tag: str) -> float:
    """Return the mean over the runs of the median in the second half of each."""
    medians = []
    for run in arm.runs:
        values = run.curve(tag).values
        medians.append(np.median(values[len(values) // 2 :]))
    return float(np.mean(medians))
