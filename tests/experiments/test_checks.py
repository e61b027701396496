"""What counts as a difference between two configs."""

from pathlib import Path
from typing import Any

import pytest

from lightning_sv.experiments.checks import config_differences
from lightning_sv.runs.events import Run


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
def test_what_an_arm_says_is_expected(a: dict[str, Any], b: dict[str, Any], args: list[str], unexpected: list) -> None:
    runs = {name: Run(Path(name), "x", config, {}, {}) for name, config in (("a", a), ("b", b))}
    assert [d.key for d in config_differences(runs, args) if not d.expected] == unexpected
