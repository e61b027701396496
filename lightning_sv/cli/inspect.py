"""`lightning-sv inspect`: statistics of the scale vectors of a run or of a transformers model."""

from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from lightning_sv.errors import ConfigError, expect
from lightning_sv.interop.inspect import (
    VectorStatistics,
    load_model,
    statistics,
    vectors_of_backbone,
    vectors_of_model,
)
from lightning_sv.json_text import json_text
from lightning_sv.nn import meta_backbone
from lightning_sv.roles import family
from lightning_sv.runs.checkpoint import read_model
from lightning_sv.runs.directory import LAST, printable
from lightning_sv.settings.plain_parser import PlainParser

#: heading -> width, format and value of a column; a cell is the mean over the vectors of its row
_COLUMNS: dict[str, tuple[int, str, Callable[[VectorStatistics], float]]] = {
    "mean": (7, ".3f", lambda row: row.mean),
    "rms": (7, ".3f", lambda row: row.rms),
    "< 0": (7, ".1%", lambda row: row.negative),
    "= 1": (8, ".1%", lambda row: row.at_start),
    "distinct": (9, ".0f", lambda row: row.distinct),
    "dead": (7, ".1%", lambda row: row.dead),
    "outliers": (9, ".1%", lambda row: row.outliers),
}
_LEGEND = """= 1: exactly at its initial value. distinct: different values per vector.
dead: below 5% of the median size; outliers: above 8 times it."""


def run(argv: list[str]) -> int:
    """Parse the arguments, read the vectors, print and draw them; return the exit code."""
    options = _options(argv)
    name, rows, notes = _read(
        options.model, options.trust_module, trust_remote_code=options.trust_remote_code
    )
    if not rows:
        problem = f"{name} has no scale vectors; expected a model with norms."
        raise ConfigError(" ".join([problem, *notes]))
    families = _by_family(rows)
    if options.png is not None:
        from lightning_sv.plots.inspect_plot import draw_vectors  # importing takes a second

        draw_vectors(name, families, options.png)
    if options.json:
        vectors = [row._asdict() for row in rows]
        print(json_text({"model": name, "vectors": vectors, "notes": notes}))
        return 0
    lines = [f"{name}: scale vectors", *_table(families), _LEGEND, *notes]
    print(printable("\n".join(lines)))
    if options.png is not None:
        print(f"drawn: {options.png}")
    return 0


def _options(argv: list[str]) -> Namespace:
    """Parse the arguments, and check the name of the picture."""
    text = "Statistics of the scale vectors of a run, or of a model of transformers."
    parser = PlainParser("inspect", text, json="Print the statistics as JSON.")
    parser.add_argument(
        "model", type=Path, help="Folder of a model, run directory, or checkpoint of a run."
    )
    parser.add_argument("--png", type=Path, help="File of the picture, ending in .png.")
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="Run modelling code in the model's folder."
    )
    parser.add_trust("a run")
    options = parser.parse_args(argv)
    is_picture = options.png is None or options.png.suffix == ".png"
    expect(is_picture, "--png", options.png, "a file that ends in .png.")
    return options


def _by_family(rows: Sequence[VectorStatistics]) -> dict[str, list[VectorStatistics]]:
    families: dict[str, list[VectorStatistics]] = defaultdict(list)
    for row in rows:
        families[family(row.name).removesuffix(".weight")].append(row)
    return families


def _read(
    path: Path, allow: Sequence[str], *, trust_remote_code: bool
) -> tuple[str, list[VectorStatistics], list[str]]:
    """Return the model's name, the statistics of its scale vectors, and notes on missing values."""
    if path.suffix == ".ckpt" or (path / LAST).exists():
        config, strategy, choices, weights, _ = read_model(path, allow)
        model = meta_backbone(config, strategy, choices)
        model.load_state_dict(weights, assign=True)  # mapped from the file
        return (
            f"{config.name}, {strategy}{choices.label()}",
            list(map(statistics, vectors_of_backbone(model))),
            [],
        )
    found = vectors_of_model(load_model(path, trust_remote_code=trust_remote_code))
    return f"{found.model} in {path}", list(map(statistics, found.vectors)), found.notes


def _table(families: dict[str, list[VectorStatistics]]) -> list[str]:
    """Return lines of 80 columns: headings per family and role, and parts of the depth."""
    headings = "layers".ljust(8)
    for heading, (width, *_) in _COLUMNS.items():
        headings += heading.rjust(width)
    lines = [headings]
    for path, rows in families.items():
        for (role, folds), alike in _by_role(rows).items():
            lines += ["", f"{path}: {role}, {'folds' if folds else 'stays'}"]
            lines += map(_row, _parts(alike))
    return [*lines, ""]


def _parts(rows: Sequence[VectorStatistics]) -> list[Sequence[VectorStatistics]]:
    """Return up to three parts of the depth."""
    parts = np.array_split(np.arange(len(rows)), min(3, len(rows)))
    return [rows[part[0] : part[-1] + 1] for part in parts]


def _by_role(rows: Sequence[VectorStatistics]) -> dict[tuple[str, bool], list[VectorStatistics]]:
    """Group the vectors of a family by role and by whether they fold."""
    groups: dict[tuple[str, bool], list[VectorStatistics]] = defaultdict(list)
    for row in rows:
        groups[row.role, row.folds].append(row)
    return groups


def _row(rows: Sequence[VectorStatistics]) -> str:
    """Return the line of some layers, with the mean of each column."""
    line = f"  {_layers(rows):6}"
    for width, words, value in _COLUMNS.values():
        mean = float(np.mean([value(row) for row in rows]))
        line += format(mean, words).rjust(width)
    return line.rstrip()


def _layers(rows: Sequence[VectorStatistics]) -> str:
    """Return the first and the last layer of some vectors; empty outside the layers."""
    depths = sorted({row.depth for row in rows if row.depth is not None})
    if not depths:
        return ""
    if len(depths) == 1:
        return f"{depths[0]}"
    return f"{depths[0]}-{depths[-1]}"
