"""Launches in a row: none dies below Python, and none hangs.

One did once (signal 11, two processes, FSDP2, Muon), in a way that left no trace.
"""

import itertools
from pathlib import Path

import pytest

from tests.faults.conftest import Tally
from tests.faults.short_launch import RECIPES
from tests.launch import launch

LAUNCHES = 200


@pytest.mark.faults
@pytest.mark.timeout(3600)
def test_launches_in_a_row_all_end_well(tmp_path: Path, tally: Tally) -> None:
    failed = []
    for n, recipe in zip(range(LAUNCHES), itertools.cycle(RECIPES)):
        ended = launch("tests.faults.short_launch", recipe, logs=tmp_path, seconds=120)
        tally("a launch of two forked ranks, FSDP2 and Muon", ended.fine)
        if not ended.fine:
            failed.append(f"launch {n}, {recipe}: {ended}")
    assert not failed, "\n".join(failed)
