"""Pools of arms that share their scatter: those that are compared directly or through other arms."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from lightning_sv.experiments.claims.pooling import FINAL, LossAt, Pool
from lightning_sv.runs.events import Curve, Run


def of(value: float, seeds: int = 2) -> dict[int, Run]:
    noise = np.random.default_rng(int(value)).normal(0, 0.01, 3) if value == value else np.zeros(3)
    return {
        s: Run(Path("x"), "x", {}, {}, {"val/loss": Curve(np.array([1]), np.array([value + noise[s]]))})
        for s in range(seeds)
    }


def pool_of(runs: Mapping[str, Mapping[int, Run]], *panels: str) -> Pool:
    pool = Pool()
    for arms in panels:
        pool.add({arm: runs[arm] for arm in arms})
    return pool


def test_pool_has_the_arms_that_are_compared() -> None:
    """Panels that share an arm have one pool; other panels have their own."""
    runs = {"a": of(1.0), "b": of(2.0, 3), "c": of(3.0), "x": of(4.0), "y": of(5.0)}
    pool = pool_of(runs, "ab", "bc", "xy")
    d = pool.difference("a", "c", FINAL, 0.9)
    assert d.mean == pytest.approx(-2.0, abs=0.05) and d.confidence == 0.9
    assert d.scatter == "scatter of 3 arms, 2 degrees of freedom"
    assert pool.difference("x", "y", FINAL, 0.9).scatter == "" == pool.difference("a", "x", FINAL, 0.9).scatter
    runs["c"] = of(math.nan)
    pool = pool_of(runs, "ab", "bc", "xy")
    assert pool.difference("a", "b", FINAL, 0.9).mean == pytest.approx(-1.0, abs=0.05)
    with pytest.raises(ValueError, match="x diverged"):
        pool.difference("c", "b", FINAL, 0.9)
    pool, early = pool_of(runs, "ab"), LossAt(0.5)
    with pytest.raises(ValueError, match="validation loss"):
        pool.difference("a", "b", early, 0.9)
