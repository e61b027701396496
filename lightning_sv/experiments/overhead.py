"""Rows of tables: step times from the benchmarks or from training runs, and what the theory's claims came to."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lightning_sv.errors import ConfigError
from lightning_sv.experiments.results import Arm, Table


def measured_table(path: Path) -> Table:
    """Rows of a file that another command wrote: claims of `make theory` in a list, step times of `make bench` else.

    Raises:
        ConfigError: the file is not there, or is neither
    """
    try:
        is_theory = isinstance(json.loads(path.read_text(encoding="utf-8")), list)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} has no figures ({error!r}); make theory or make bench writes it.") from error
    return theory_table(path) if is_theory else benchmark_table(path)


def theory_table(path: Path, claim: str = "or") -> Table:
    """Statements of one theorem with their verdicts, as `make theory` wrote them.

    Args:
        path: theory.json
        claim: word of the theorem; 'or' is the paper's Figure 11

    Raises:
        ConfigError: the file has none
    """
    try:
        found = [row for row in json.loads(path.read_text(encoding="utf-8")) if row["claim"] == claim]
        rows = tuple(
            (row["part"], row["statement"], _digits(row["stated"]), _digits(row["measured"]), row["verdict"])
            for row in found
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} has no claims ({error!r}); make theory writes it.") from error
    if not rows:
        raise ConfigError(f"{path} has no claim {claim!r}; make theory writes it.")
    note = f"Checked apart from this page by make theory ({path})."
    return Table(("part", "statement", "stated", "measured", "verdict"), rows, note)


def _digits(value: str | float) -> str:
    """Eight digits: 0.99999735 is below 1."""
    return value if isinstance(value, str) else f"{value:.8g}"


def benchmark_table(path: Path) -> Table:
    """Step times over llama's, as `make bench` wrote them, and on what.

    Raises:
        ConfigError: the file is not there, or not what `make bench` writes
    """
    try:
        modes = json.loads(path.read_text())
        rows = tuple(
            (f"{row['name']}, {mode}", row["milliseconds"], row["ratio"], row["low"], row["high"], row["pairs"])
            for mode, groups in modes.items()
            if isinstance(groups, dict) and "strategies" in groups
            for row in groups["strategies"]
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} has no step times ({error!r}); make bench writes it.") from error
    machine = ", ".join(f"{key} {value}" for key, value in modes.get("machine", {}).items()) or "machine not stated"
    note = f"Measured apart from this page ({path}): {machine}."
    return Table(("strategy", "ms a step", "over llama", "low", "high", "pairs"), rows, note)


def throughput_table(arms: Sequence[Arm]) -> Table:
    """Medians after the first half of each arm's runs: tokens per second, peak memory; sequences at a time."""

    def late(arm: Arm, tag: str) -> float:
        return float(np.mean([np.median(x[len(x) // 2 :]) for x in (run.curve(tag).values for run in arm.runs)]))

    def batch(arm: Arm) -> str | float:
        return (arm.runs[0].config.get("data") or {}).get("micro_batch") or "not stated"

    speed, memory = "throughput/tokens_per_s", "memory/peak_gib"
    columns = ("strategy", "tokens per second", "peak memory, GiB", "micro-batch", "runs")
    rows = tuple((arm.label, late(arm, speed), late(arm, memory), batch(arm), len(arm.runs)) for arm in arms)
    return Table(columns, rows)
