"""A fault that reaches one device of several: all of them stop, or go on, together."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.conftest import Tally


@pytest.mark.slow
def test_a_fault_on_one_device(short_args: list[str], tmp_path: Path, tally: Tally) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path / "asked"}\n')
    scontrol.chmod(0o755)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, "-m", "tests.faults.two_processes", str(tmp_path), *short_args],
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found = json.loads(line)
    for fault, recovered in found.items():
        tally(fault, recovered)
    assert len(found) == 4 and all(found.values()), found
