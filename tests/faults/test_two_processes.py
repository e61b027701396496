"""A fault that reaches one device of several: all of them stop, or go on, together."""

import json
from pathlib import Path

import pytest

from tests.faults.conftest import Tally
from tests.launch import launch


@pytest.mark.long
def test_fit_fault_on_one_of_two_devices_is_handled_by_both(
    short_args: list[str], tmp_path: Path, tally: Tally
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path / "asked"}\n')
    scontrol.chmod(0o755)
    ended = launch("tests.faults.two_processes", str(tmp_path), *short_args, logs=tmp_path, seconds=300)
    assert ended.fine, ended
    (line,) = [line for line in ended.logs[0].splitlines() if line.startswith("{")]
    found = json.loads(line)
    assert len(found) == 4
    for fault, recovered in found.items():
        tally(fault, recovered)
