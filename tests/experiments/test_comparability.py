"""Differences between two configs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_sv.experiments.comparability import comparability_warnings
from lightning_sv.runs.events import Curve, Run

ENDS = Curve(np.array([1]), np.array([3.0]))


@pytest.mark.parametrize(("a", "b", "args", "unexpected"), [
    ({"x": {}}, {"x": {"lm_head": "dp"}}, ["x.lm_head"], []),
    ({"x": {}}, {"x": {"lm_head": "dp"}}, [], ["x.lm_head"]),
    ({"x": {}}, {}, [], []),
    ({"x": {"y": 1}}, {"x": {"y": 1, "later": None}}, [], []),
    ({"x": {"y": 1}}, {"x": {"y": 1, "later": 0}}, [], ["x.later"]),
    ({"x": {"y": 1}}, {"x": {"y": 2}}, ["x"], []),
    ({"x": {"y": 1}}, {"x": {"y": 2}}, ["x.yy"], ["x.y"]),
    ({"seed_everything": 0, "model": {"seed": 0}}, {"seed_everything": 1, "model": {"seed": 1}}, [], []),
])  # fmt: skip
def test_comparability_warnings_name_unexpected_keys(
    a: dict[str, Any], b: dict[str, Any], args: list[str], unexpected: list
) -> None:
    runs = {name: Run(Path(name), "x", config, {}, {"val/loss": ENDS}) for name, config in (("a", a), ("b", b))}
    assert [warning.split(":")[0].split()[-1] for warning in comparability_warnings(runs, args)] == unexpected


def test_comparability_warnings_name_a_default() -> None:
    runs = {n: Run(Path(n), "x", {"model": {"seed": k}}, {}, {"val/loss": ENDS}) for n, k in (("a", None), ("b", 5))}
    assert comparability_warnings(runs) == ["The configs differ in model.seed: the default against 5 (a, b)."]
