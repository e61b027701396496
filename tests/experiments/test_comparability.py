"""Differences between two configs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_sv.experiments.comparability import comparability_warnings, config_differences
from lightning_sv.runs.events import Curve, Run


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
def test_config_differences_keys_of_an_arm_may_differ(
    a: dict[str, Any], b: dict[str, Any], args: list[str], unexpected: list
) -> None:
    runs = {name: Run(Path(name), "x", config, {}, {}) for name, config in (("a", a), ("b", b))}
    assert [key for key, *_ in config_differences(runs, args)] == unexpected


def test_config_differences_default_is_the_value_in_use() -> None:
    """If a config has no learning rate or length, the summary has the value in use."""

    def run(summary: dict[str, Any], **model: Any) -> Run:
        config = {"model": {"optim": {"lr": model.pop("lr", None)}, **model}, "trainer": {"max_steps": -1}}
        return Run(Path("r"), "x", config, summary, {"val/loss": Curve(np.array([1]), np.array([3.0]))})

    plain, same = run({"lr": 0.006, "steps": 9}), run({"lr": 0.006, "steps": 9}, lr=0.006)
    assert config_differences({"a": plain, "b": same}, []) == []
    assert config_differences({"a": plain, "b": run({"lr": 0.003, "steps": 8})}, []) == []  # both have defaults
    other = run({"lr": 0.003, "steps": 8}, lr=0.003)
    assert config_differences({"a": plain, "b": other}, []) == [("model.optim.lr", 0.006, 0.003, "a, b")]
    runs = {"a": run({}, seed=None), "b": run({}, seed=5)}
    (warning,) = comparability_warnings(runs)
    assert "model.seed" in warning and "None" not in warning and "5" in warning
