"""Schedules against their closed forms."""

import itertools
import math
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_sv.optim import ScheduleConfig

ratios = st.floats(0, 0.99)


def factors(schedule: ScheduleConfig, total: int) -> list[float]:
    return [schedule.factor(step, total) for step in range(total)]


@pytest.mark.parametrize("total", [10, 1000, 24_361])
def test_cosine_schedule(total: int) -> None:
    found = factors(ScheduleConfig(warmup_ratio=0.1), total)
    warmup = round(0.1 * total)
    assert max(found) == found[warmup] == 1.0
    assert found[-1] == pytest.approx(0.05)
    steps = [b - a for a, b in itertools.pairwise(found[:warmup])]
    assert all(step == pytest.approx(1 / (warmup + 1)) for step in steps)
    assert all(a >= b for a, b in itertools.pairwise(found[warmup:]))
    for step in range(warmup, total):  # the closed form, which no other decay meets
        p = (step - warmup) / (total - 1 - warmup)
        assert found[step] == pytest.approx(0.05 + 0.95 * (1 + math.cos(math.pi * p)) / 2, abs=1e-12)


def test_wsd_in_exact_numbers() -> None:
    found = factors(ScheduleConfig("wsd", warmup_ratio=0.15, final_ratio=0), 20)
    assert found[:3] == [1 / 4, 2 / 4, 3 / 4]
    assert found[3:17] == [1.0] * 14  # stable until step 16, 80% of all 20 steps, where the line begins
    assert found[17:] == [3 / 4, 2 / 4, 1 / 4]  # and would be 0 at step 20


@pytest.mark.parametrize("final", [0.0, 0.05])
@pytest.mark.parametrize("total", [10, 1000, 24_361])
def test_wsd_schedule(total: int, final: float) -> None:
    found = factors(ScheduleConfig("wsd", warmup_ratio=0.1, final_ratio=final), total)
    warmup, stable = round(0.1 * total), round(0.8 * total)
    for step, factor in enumerate(found):
        if step < warmup:
            expected = (step + 1) / (warmup + 1)
        elif step < stable:
            expected = 1.0
        else:
            share = (step - stable) / (total - stable)
            expected = (1 - share) + share * final
        assert factor == pytest.approx(expected, abs=1e-12)


@given(st.integers(1, 400), ratios, ratios, st.floats(0, 1))
def test_wsd_phases(total: int, warmup_ratio: float, final: float, stable_ratio: float) -> None:
    assume(warmup_ratio <= stable_ratio)
    found = factors(ScheduleConfig("wsd", warmup_ratio, final, stable_ratio), total)
    warmup, stable = round(warmup_ratio * total), round(stable_ratio * total)
    assert all(0 < factor <= 1 for factor in found)
    assert all(a < b for a, b in itertools.pairwise(found[:warmup]))
    assert all(factor == 1 for factor in found[warmup : stable + 1])
    assert all(a > b for a, b in itertools.pairwise(found[stable:]))
    if warmup < total:
        assert max(found) == 1 and found[-1] >= final
    # continuous: no step is larger than the slope of the phase it is in
    slope = max(1 / (warmup + 1), (1 - final) / max(1, total - stable))
    assert all(abs(a - b) <= slope + 1e-12 for a, b in itertools.pairwise(found))


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
def test_schedule_errors(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"model.schedule.{message}"):
        ScheduleConfig(**kwargs)


def test_cos_does_not_read_the_stable_ratio() -> None:
    late = ScheduleConfig("cos", warmup_ratio=0.9)
    assert factors(late, 50) == factors(ScheduleConfig("cos", warmup_ratio=0.9, stable_ratio=0.1), 50)
