"""`lightning-sv runs`: list the runs in a folder."""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from lightning_sv.errors import ConfigError, expect
from lightning_sv.json_text import json_text
from lightning_sv.runs.directory import (
    config_value,
    is_begun,
    is_complete,
    is_diverged,
    printable,
    read_config,
    read_summary,
)
from lightning_sv.settings.plain_parser import PlainParser

log = logging.getLogger(__name__)

#: columns of a line that no terminal folds
_WIDEST = 10_000


def run(argv: list[str]) -> int:
    """Parse the arguments, list the runs; return the exit code."""
    text = "List runs: data, strategy, rate, steps, loss."
    parser = PlainParser("runs", text, json="Print the list as JSON.")
    parser.add_argument(
        "folder", nargs="*", type=Path, default=[Path("runs")], help="Folders; by default runs/."
    )
    options = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for folder in options.folder:
        expect(folder.is_dir(), "folder", folder, "a folder of runs. Train one with make train.")
        rows += _rows(folder)
    if options.json:
        print(json_text(rows))
    else:
        _print(rows)
    return 0


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    for run_dir in _run_dirs(folder):
        try:
            yield _row(run_dir)
        except ConfigError as error:
            log.warning("%s", error)


def _print(rows: Iterable[Mapping[str, Any]]) -> None:
    numbers = [Column(name, justify="right") for name in ("rate", "steps", "validation loss")]
    table = Table("run", "data", "strategy", *numbers, box=None)
    for row in rows:
        values = [row[key] for key in ("run", "data", "strategy", "lr", "steps")]
        table.add_row(*map(_cell, [*values, _loss(row)]))
    console = Console()
    if not console.is_terminal:  # for other programs, which cut no lines
        console = Console(width=_WIDEST)
    console.print(table)


def _loss(row: Mapping[str, Any]) -> str | None:
    """Return the loss of a run with four decimals, or why it has none."""
    if row["complete"]:
        loss = row["val_loss"]
        return None if loss is None else f"{loss:.4f}"
    return "diverged" if row["diverged"] else "not complete"


def _run_dirs(folder: Path) -> Iterator[Path]:
    for path, inner, _ in os.walk(folder):
        if is_begun(Path(path)) or is_complete(Path(path)):
            inner.clear()
            yield Path(path)
        inner.sort()


def _row(run_dir: Path) -> dict[str, Any]:
    """Return the row of a run from its summary, or from its config if it has none."""
    summary = read_summary(run_dir)
    config = read_config(run_dir)
    corpus = config_value(config, "data.corpus.dir")
    if corpus is not None:
        corpus = Path(str(corpus)).name
    return {
        "run": str(run_dir),
        "data": corpus,
        "strategy": summary.get("label") or config_value(config, "model.scale"),
        "lr": summary.get("lr", config_value(config, "model.optim.lr")),
        "steps": summary.get("steps") or config_value(config, "trainer.max_steps"),
        "val_loss": summary.get("val_loss"),
        "complete": is_complete(run_dir),
        "diverged": is_diverged(run_dir),
    }


def _cell(value: Any) -> Text:
    """Return a value as text without control characters."""
    text = str(value)
    if isinstance(value, float):
        text = f"{value:.4g}"
    elif value in (None, -1):
        text = ""
    return Text(printable(text), overflow="fold")
