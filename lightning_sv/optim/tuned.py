"""Tuned peak learning rates per model, optimizer, schedule and strategy, from conf/tuned."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from lightning_sv.errors import ConfigError
from lightning_sv.scale import ScaleStrategy

FILE = Path(__file__).parents[1] / "conf/tuned/learning_rates.yaml"
#: a row of the file: keys of a run, and its `lr` or the `reason` why there is none
Row = dict[str, Any]


@cache
def _rows(section: str) -> list[Row]:
    rows: list[Row] = yaml.safe_load(FILE.read_text(encoding="utf-8"))[section]
    return rows


def tuned_lr(model: str, optimizer: str, schedule: str, strategy: ScaleStrategy) -> float:
    """Return the tuned peak learning rate.

    Raises:
        ConfigError: there is no value for the combination; the message lists those of this model
    """
    run = {"model": model, "optim": optimizer, "schedule": schedule}
    rates = _matching_rows("rates", run | {"placement": strategy.placement})
    if rates:
        return float(rates[0]["lr"])

    case = f"model {model!r} with optimizer {optimizer!r} and schedule {schedule!r}"
    for row in _matching_rows("not_reported", run):
        case += f" ({row['reason']})"
    hint = "`lightning-sv sweep --lr` finds it."
    cases = _tuned_cases(model)
    if cases:
        hint = f"Tuned are: {', '.join(cases)}."
    raise ConfigError(
        f"model.optim.lr is not set; expected a rate, because none is tuned for {case}. {hint}"
    )


def _matching_rows(section: str, run: Row) -> list[Row]:
    """Return the rows of a section that match the run; a key that a row lacks matches any value."""
    return [row for row in _rows(section) if _matches(row, run)]


def _matches(row: Row, run: Row) -> bool:
    shared = row.keys() & run.keys()
    return all(row[key] == run[key] for key in shared)


def _tuned_cases(model: str) -> list[str]:
    """Return 'model optimizer schedule' of the model's rows."""
    rows = _matching_rows("rates", {"model": model})
    cases = [f"{row['model']} {row['optim']} {row['schedule']}" for row in rows]
    return list(dict.fromkeys(cases))  # rows of single placements repeat a case
