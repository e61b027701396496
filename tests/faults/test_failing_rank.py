"""A rank that fails ends the whole job within seconds, whatever the others wait for."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.lit.runs import finish, start
from tests.lit.several_processes import CPU, STRATEGIES


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("fails", ["0", "1", "killed"])
def test_a_rank_that_fails_ends_the_job(fails: str, short_args: list[str], tmp_path: Path) -> None:
    """By Lightning's own launcher; also when rank 0 is killed."""
    args = ["--config", str(STRATEGIES["ddp"]), *CPU, *short_args, "--trainer.devices", "2", "--trainer.max_steps", "4"]
    env = os.environ | {"FAILS": "-1" if fails == "killed" else fails, "OMP_NUM_THREADS": "1"}
    process = start(args, tmp_path / "run", module="tests.faults.failing_rank", env=env, start_new_session=True)
    try:
        assert process.stdout is not None
        pids: dict[str, int] = {}
        while len(pids) < 2:
            line = process.stdout.readline()
            assert line, "both ranks must reach the second step"
            pids |= {rank: int(pid) for rank, pid in re.findall(r"rank (\d) is process (\d+)\.", line)}
        if fails == "killed":
            process.kill()
        begin = time.monotonic()
        code, output = finish(process, seconds=10)
        while any(map(is_alive, pids.values())):
            assert time.monotonic() - begin < 10, output
            time.sleep(0.05)
    finally:
        if process.poll() is None or any(map(is_alive, pids.values())):
            os.killpg(process.pid, signal.SIGKILL)
    # rank 0 is killed by Lightning where another fails
    fine = code == (1 if fails == "0" else -signal.SIGKILL)
    fine &= fails == "killed" or ("IndexError: a rank fails" in output)
    assert fine, (code, output)
