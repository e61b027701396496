"""A failing rank ends the job within seconds, even if the others wait in a collective; all stop or
go on together."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import lightning as L
import pytest
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.strategies import Strategy

from lightning_sv.lit.distributed import join_ranks
from lightning_sv.runs.directory import read_summary
from tests.conftest import argv, is_running
from tests.faults.conftest import Tally
from tests.launch import launch
from tests.lit.runs import finish, run_fit, start
from tests.lit.several_processes import CPU, STRATEGIES


@pytest.mark.long
@pytest.mark.parametrize("fails", ["0", "1", "killed"])
def test_fit_failing_rank_ends_the_job(fails: str, short_args: list[str], tmp_path: Path) -> None:
    """By Lightning's own launcher; also when rank 0 is killed."""
    args = ["--config", str(STRATEGIES["ddp"]), *CPU, *short_args]
    args += argv("--trainer.devices 2 --trainer.max_steps 4")
    env = os.environ | {"FAILS": "-1" if fails == "killed" else fails, "OMP_NUM_THREADS": "1"}
    process = start(
        args, tmp_path / "run", module="tests.faults.failing_rank", env=env, start_new_session=True
    )
    try:
        assert process.stdout is not None
        pids: dict[str, int] = {}
        while len(pids) < 2:
            line = process.stdout.readline()
            assert line, "both ranks must reach the second step"
            for rank, pid in re.findall(r"rank (\d) is process (\d+)\.", line):
                pids[rank] = int(pid)
        if fails == "killed":
            process.kill()
        begin = time.monotonic()
        code, output = finish(process, seconds=10)
        while any(map(is_running, pids.values())):
            assert time.monotonic() - begin < 10, output
            time.sleep(0.05)
    finally:
        if process.poll() is None or any(map(is_running, pids.values())):
            os.killpg(process.pid, signal.SIGKILL)
    # Lightning kills rank 0 if a different rank fails
    assert code == (1 if fails == "0" else -signal.SIGKILL), output
    assert fails == "killed" or "RuntimeError: a rank fails" in output, output


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(("given", "minutes"), [({}, 10), ({"timeout": "0:30:00"}, 30)])
def test_timeout_is_ten_minutes_or_the_given_one(
    name: str, given: dict[str, str], minutes: int
) -> None:
    """Also if it is given as the 30 minutes that are Lightning's default."""
    shipped = yaml.safe_load(STRATEGIES[name].read_text())["trainer"]["strategy"]
    shipped["init_args"] |= given
    parser = ArgumentParser()
    parser.add_subclass_arguments(Strategy, "strategy")
    config = parser.parse_object({"strategy": shipped})
    strategy = parser.instantiate(config).strategy
    join_ranks(L.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False))
    assert strategy._timeout == timedelta(minutes=minutes)


@pytest.mark.faults
def test_torchrun_failed_job_restarts_from_its_checkpoint(
    short_args: list[str], tmp_path: Path
) -> None:
    """torchrun kills the waiting rank after 30 s, and starts both again."""
    words = "--trainer.max_steps 4 --checkpoint.every_n_steps 1 --ckpt_path last"
    args = [*short_args, *argv(words)]
    assert run_fit(args, tmp_path / "alone") == 0
    torchrun = argv(
        "-m torch.distributed.run --standalone --nproc-per-node=2 --max-restarts=1"
        f" -m tests.faults.failing_rank fit --config {STRATEGIES['ddp']}"
    )
    command = [sys.executable, *torchrun, *CPU, *args, "--trainer.devices", "2"]
    env = {"FAILS": "1", "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(
        [*command, "--run_dir", str(tmp_path / "run")],
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "RuntimeError: a rank fails" in done.stderr
    ended, alone = (read_summary(tmp_path / name) for name in ("run", "alone"))
    assert ended["val_loss"] == pytest.approx(alone["val_loss"], rel=1e-5)
    assert len(ended["legs"]) == 2


@pytest.mark.long
def test_fit_fault_on_one_of_two_devices_is_met_by_both(
    short_args: list[str], tmp_path: Path, tally: Tally
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path / "asked"}\n')
    scontrol.chmod(0o755)
    ended = launch("tests.faults.two_processes", str(tmp_path), *short_args, logs=tmp_path)
    (line,) = [line for line in ended.logs[0].splitlines() if line.startswith("{")]
    found = json.loads(line)
    assert len(found) == 3
    for fault, recovered in found.items():
        tally(fault, recovered)
