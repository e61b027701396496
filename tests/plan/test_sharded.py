"""What FSDP2 holds on one of two processes, against the plan."""

import json
import subprocess
import sys

import pytest

from tests.plan.sharded_steps import CASES


@pytest.mark.slow
def test_a_sharded_step_allocates_what_is_planned() -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, "-m", "tests.plan.sharded_steps"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == len(CASES)
    for row in rows:
        assert row["planned"] == pytest.approx(row["real"], rel=0.1), row
