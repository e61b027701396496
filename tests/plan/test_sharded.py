"""Memory of FSDP2 on one of two processes, against the plan."""

import json
from pathlib import Path

import pytest

from tests.launch import launch
from tests.plan.sharded_steps import CASES


@pytest.mark.long
def test_a_sharded_step_allocates_what_is_planned(tmp_path: Path) -> None:
    ended = launch("tests.plan.sharded_steps", logs=tmp_path, seconds=300)
    assert ended.fine, ended
    rows = [json.loads(line) for line in ended.logs[0].splitlines() if line.startswith("{")]
    assert len(rows) == len(CASES)
    for row in rows:
        assert row["planned"] == pytest.approx(row["real"], rel=0.1), row
