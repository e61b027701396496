"""Schedules against their closed forms."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sv.optim import ScheduleConfig

ratios = st.floats(0, 0.99)


@given(st.integers(1, 30_000), ratios, ratios, st.data())
def test_schedule_factor_equals_closed_form(total: int, warmup_ratio: float, final: float, data: st.DataObject) -> None:
    warmup = round(warmup_ratio * total)
    step = data.draw(st.integers(0, total - 1))
    cos = ScheduleConfig("cos", warmup_ratio, final).factor(step, total)
    if step < warmup:
        assert cos == pytest.approx((step + 1) / (warmup + 1), abs=1e-12)
    else:
        share = (step - warmup) / max(1, total - 1 - warmup)
        assert cos == pytest.approx(final + (1 - final) * (1 + math.cos(math.pi * share)) / 2, abs=1e-12)

    stable_ratio = data.draw(st.floats(warmup_ratio, 1))
    stable = round(stable_ratio * total)
    wsd = ScheduleConfig("wsd", warmup_ratio, final, stable_ratio).factor(step, total)
    if step < stable:
        assert wsd == pytest.approx(min(1, (step + 1) / (warmup + 1)), abs=1e-12)
    else:
        share = (step - stable) / (total - stable)
        assert wsd == pytest.approx((1 - share) + share * final, abs=1e-12)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"name": "linear"}, "name 'linear' is unknown; known: cos wsd"),
        ({"warmup_ratio": 1.0}, "warmup_ratio is 1.0"),
        ({"final_ratio": -0.1}, "final_ratio is -0.1"),
        ({"stable_ratio": 1.1}, "stable_ratio is 1.1"),
        ({"name": "wsd", "warmup_ratio": 0.9}, "warmup_ratio is 0.9"),
    ],
)
def test_schedule_config_setting_out_of_range_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"model.schedule.{message}"):
        ScheduleConfig(**kwargs)
