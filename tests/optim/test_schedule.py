"""Schedules against their closed forms."""

import math

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
