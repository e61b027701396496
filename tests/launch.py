"""Launches of a few ranks without their imports: what torchrun does, by fork from one process that
is kept.

`python -m tests.launch` has imported all that a fit needs and has run nothing. For every line of
its stdin it forks the ranks, which run a module as `python -m` does and leave through the
interpreter's own end, and writes a line with their exit codes. Their store is outside of them, as
torchrun's is. A rank that crashes below Python prints its stack.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]


class Ended(NamedTuple):
    """Exit codes of the ranks, minus its number for a signal, and what each wrote."""

    codes: list[int]
    logs: list[str]

    def __str__(self) -> str:
        return f"exit codes {self.codes}\n" + "\n".join(log[-6000:] for log in self.logs)


def launch(
    module: str, *args: str, logs: Path, seconds: float = 300, ranks: int = 2, fails: bool = False
) -> Ended:
    """Run `module` on this number of ranks, and assert that none fails, or that one `fails`.

    After `seconds`, abort the rest, which then print their stack.
    """
    server = _server()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert server.stdin is not None and server.stdout is not None
    files = [logs / f"rank{rank}.log" for rank in range(ranks)]
    asked = {
        "module": module,
        "args": args,
        "cwd": str(Path.cwd()),
        "logs": list(map(str, files)),
        "seconds": seconds,
    }
    print(json.dumps(asked | {"port": store.port}), file=server.stdin, flush=True)
    codes = json.loads(server.stdout.readline())
    ended = Ended(codes, [file.read_text(errors="replace") for file in files])
    assert any(codes) == fails, ended
    return ended


@cache
def _server() -> subprocess.Popen[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1"}  # as torchrun has it
    command = [sys.executable, "-m", "tests.launch"]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    atexit.register(server.kill)
    return server


def _serve() -> None:
    import lightning_sv.lit.cli  # noqa: F401 (what a fit imports)
    import lightning_sv.plots.run_plot
    import lightning_sv.runs.events  # noqa: F401

    lightning_sv.plots.run_plot.draw_run = lambda run, path: None
    faulthandler.enable()
    gc.collect()
    gc.freeze()  # or every rank would search the imports for garbage, and copy their pages
    for line in sys.stdin:
        asked = json.loads(line)
        codes = _finish(
            [_fork(rank, asked) for rank in range(len(asked["logs"]))], asked["seconds"]
        )
        print(json.dumps(codes), flush=True)


def _fork(rank: int, asked: dict) -> int:
    """Process id of a rank; the rank itself leaves by SystemExit, up through the whole stack."""
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    pid = os.fork()
    if pid:
        return pid
    log = os.open(asked["logs"][rank], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    for stream, file in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(file, stream)
    ranks = len(asked["logs"])
    os.environ |= {
        "RANK": f"{rank}",
        "LOCAL_RANK": f"{rank}",
        "WORLD_SIZE": f"{ranks}",
        "LOCAL_WORLD_SIZE": f"{ranks}",
    }
    os.environ |= {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{asked['port']}"}
    os.environ |= {"TORCHELASTIC_RUN_ID": "launch", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    # Lightning reads RANK when it is imported.
    rank_zero_only.rank = rank  # type: ignore[attr-defined]
    os.chdir(asked["cwd"])
    sys.argv[1:] = asked["args"]
    runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
    if distributed.is_initialized():  # Lightning leaves it, and its threads may abort an exit
        distributed.destroy_process_group()
    sys.exit()


def _finish(pids: list[int], seconds: float) -> list[int]:
    """Wait for all ranks; one that fails or hangs ends the others."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    asked = set[int]()
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif pid not in asked and (time.monotonic() > deadline or any(codes.values())):
                os.kill(pid, signal.SIGABRT)  # which faulthandler traces
                asked.add(pid)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    _serve()
