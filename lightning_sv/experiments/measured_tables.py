"""Tables of panels: step times of benchmarks or training runs, and claims of the theory."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lightning_sv.errors import ConfigError
from lightning_sv.experiments.results import Arm, Table
from lightning_sv.runs.directory import config_value


def measured_table(path: Path) -> Table:
    """Read results of `make theory` (the claim `or` of Figure 11, with eight digits) or of `make bench`.

    Raises:
        ConfigError: the file does not exist or has neither
    """
    columns: tuple[str, ...]
    rows: list[tuple[str | float, ...]]
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, list):
            columns = ("part", "statement", "stated", "measured", "verdict")
            cells = [[row[key] for key in columns] for row in found if row["claim"] == "or"]
            rows = [tuple(x if isinstance(x, str) else f"{x:.8g}" for x in row) for row in cells]
            note = f"Checked apart from this page by make theory ({path})."
        else:
            columns = ("strategy", "ms a step", "over llama", "low", "high", "pairs")
            rows = [
                (f"{row['name']}, {mode}", *(row[key] for key in ("milliseconds", "ratio", "low", "high", "pairs")))
                for mode, groups in found.items()
                if isinstance(groups, dict) and "strategies" in groups
                for row in groups["strategies"]
            ]
            machine = ", ".join(f"{key} {value}" for key, value in found.get("machine", {}).items())
            note = f"Measured apart from this page ({path}): {machine or 'machine not stated'}."
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} has no figures ({error!r}); make theory or make bench writes it.") from error
    if isinstance(found, list) and not rows:
        raise ConfigError(f"{path} has no claim 'or'; make theory writes it.")
    return Table(columns, tuple(rows), note)


def throughput_table(arms: Sequence[Arm]) -> Table:
    """Return tokens per second and peak memory of arms, medians of the second half of each run; and micro-batches."""

    def late(arm: Arm, tag: str) -> float:
        return float(np.mean([np.median(x[len(x) // 2 :]) for x in (run.curve(tag).values for run in arm.runs)]))

    def batch(arm: Arm) -> str | float:
        return config_value(arm.runs[0].config, "data.micro_batch") or "not stated"

    speed, memory = "throughput/tokens_per_s", "memory/peak_gib"
    columns = ("strategy", "tokens per second", "peak memory, GiB", "micro-batch", "runs")
    rows = tuple((arm.label, late(arm, speed), late(arm, memory), batch(arm), len(arm.runs)) for arm in arms)
    return Table(columns, rows)
