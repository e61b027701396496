"""Tuned peak learning rates per model, optimizer, schedule and strategy, from conf/tuned."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from lightning_sv.errors import ConfigError
from lightning_sv.scale import ScaleStrategy

FILE = Path(__file__).parents[1] / "conf/tuned/learning_rates.yaml"


@dataclass(frozen=True)
class TunedRate:
    """A row of the file; a placement of None is that of any strategy."""

    model: str
    optim: str
    schedule: str
    lr: float
    placement: str | None = None

    def fits(self, model: str, optim: str, schedule: str, strategy: ScaleStrategy) -> bool:
        """Return True if the row is the rate of this run."""
        if (self.model, self.optim, self.schedule) != (model, optim, schedule):
            return False
        return self.placement in (None, strategy.placement)


@cache
def _content() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))


@cache
def tuned_rates() -> list[TunedRate]:
    """Return the rows of the file."""
    return [TunedRate(**row) for row in _content()["rates"]]


def tuned_lr(model: str, optimizer: str, schedule: str, strategy: ScaleStrategy) -> float:
    """Return the tuned peak learning rate.

    Raises:
        ConfigError: there is no value for the combination; the message lists those of this model
    """
    for rate in tuned_rates():
        if rate.fits(model, optimizer, schedule, strategy):
            return rate.lr

    case = f"model {model!r} with optimizer {optimizer!r} and schedule {schedule!r}"
    reason = reason_without_rate(model, optimizer, schedule)
    if reason is not None:
        case += f" ({reason})"
    cases = known_cases(model)
    hint = f"Tuned are: {', '.join(cases)}." if cases else "`lightning-sv sweep --lr` finds it."
    raise ConfigError(
        f"model.optim.lr is not set; expected a rate, because none is tuned for {case}. {hint}"
    )


def known_cases(model: str) -> list[str]:
    """Return 'model optimizer schedule' of the model's rows."""
    rates = [rate for rate in tuned_rates() if rate.model == model]
    cases = [f"{rate.model} {rate.optim} {rate.schedule}" for rate in rates]
    return list(dict.fromkeys(cases))  # rows of single placements repeat a case


def reason_without_rate(model: str, optimizer: str, schedule: str) -> str | None:
    """Return why the paper has no rate for a model that it trains."""
    case = {"model": model, "optim": optimizer, "schedule": schedule}
    for row in _content()["not_reported"]:
        if case.items() <= row.items():
            return row["reason"]
    return None
