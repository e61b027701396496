"""Runs forked from one process that has done the imports: `python -m lightning_sv.runs.forkserver FD`.

    server: "ready"   owner: {"argv", "log", "cwd", "env"}   server: {"pid"}, and when the run has ended {"pid", "code"}

A run is a process and a session of its own as `python -m lightning_sv` would be, but for the seconds before its first
line. multiprocessing's forkserver would import the caller's main module in every run, so that a script that calls
`compare` at its top would start it again. It dies with a signal to the caller's process group while its runs, which
then count as ended, go on.
"""

import os
import signal
import subprocess
import sys
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_POLL_S = 0.05
#: what a run needs until its end, by name, because upper packages are among them; a user's own modules are not
_NEEDED = (
    "litdata",
    "litdata.streaming.item_loader",
    "torch.utils.tensorboard",
    "lightning_sv.cli.fit",
    "lightning_sv.analysis.run_plot",
)


def can_fork() -> bool:
    """Whether runs may be forked here: on macOS system libraries do not survive it, on Windows there is none."""
    return sys.platform == "linux"


class ForkServer:
    """The process that runs are forked from; it ends, and what it started is asked to stop, when this process ends."""

    def __init__(self) -> None:
        # One thread: none is there at a fork. NVML: counting GPUs must not initialize CUDA, which no fork survives.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=env,
                start_new_session=True,  # Ctrl-C and signals to the group reach the runs' owner alone
            )
        self.pid = self._process.pid
        self._ready = False
        self._running: dict[int, ForkedRun] = {}

    def start(self, argv: list[str], *, log: Path, env: dict[str, str]) -> "ForkedRun":
        """Start a run; its output is added to `log`. The first start waits for the imports."""
        run = ForkedRun(self)
        try:
            if not self._ready:
                self._pipe.recv()
                self._ready = True  # before that an interrupt must not leave a run behind
            self._pipe.send({"argv": argv, "log": str(log.resolve()), "cwd": str(Path.cwd()), "env": env})
            while (pid := self._receive()) is None:
                continue
            run.pid, self._running[pid] = pid, run
        except (EOFError, OSError):
            self._lose()
            run.returncode = -signal.SIGKILL
        return run

    def _receive(self) -> int | None:
        """Read one word of the server; return the pid of a run that it started."""
        said = self._pipe.recv()
        if "code" not in said:
            return int(said["pid"])
        self._running.pop(said["pid"]).returncode = said["code"]
        return None

    def read(self) -> None:
        """Take note of what has ended."""
        try:
            while self._pipe.poll():
                self._receive()
        except (EOFError, OSError):
            self._lose()

    def _lose(self) -> None:
        """Without the server nobody can tell when a run ends: they are killed, and resume from their checkpoints."""
        for pid, run in self._running.items():
            signal_group(pid, signal.SIGKILL)
            run.returncode = -signal.SIGKILL
        self._running = {}

    def close(self) -> None:
        """End the server, and what still runs."""
        self._pipe.close()
        if not self._ready:  # its imports would take seconds more
            self._process.kill()
        self._process.wait()


class ForkedRun:
    """A run of a `ForkServer`, as far as it is like a `subprocess.Popen`."""

    def __init__(self, server: ForkServer):
        self._server = server
        self.pid = 0
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            self._server.read()
        return self.returncode


def signal_group(pid: int, number: int) -> None:
    """Send a signal to a process and what it has started."""
    for send in (os.killpg, os.kill):
        try:
            return send(pid, number)
        except ProcessLookupError:  # it has just been forked, and leads no group yet, or has just ended
            continue


def _serve(owner: Connection) -> dict[str, Any]:
    """Fork a run for every request of the owner, until it ends; return the request in the forked process."""
    children: set[int] = set()
    try:
        owner.send("ready")
        while True:
            if owner.poll(_POLL_S if children else None):
                request: dict[str, Any] = owner.recv()
                pid = os.fork()
                if pid == 0:
                    owner.close()
                    return request
                children.add(pid)
                owner.send({"pid": pid})
            for pid in list(children):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    children.remove(pid)
                    owner.send({"pid": pid, "code": os.waitstatus_to_exitcode(status)})
    except (EOFError, OSError):  # the owner has ended, perhaps by SIGKILL: its runs write a checkpoint and end
        for pid in children:
            signal_group(pid, signal.SIGTERM)
        os._exit(0)  # nothing is left to do, and the interpreter would take a second over it


def _become(request: dict[str, Any]) -> None:
    """Make the forked process what `python -m lightning_sv` with these arguments would be."""
    os.setsid()
    import torch

    os.chdir(request["cwd"])
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(null)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(request["env"])
    # libgomp has read the server's environment
    torch.set_num_threads(int(request["env"]["OMP_NUM_THREADS"]))
    # By name, as a launcher has it. Lightning starts the processes of further devices by the command line of this one.
    program = sys.modules["__main__"] = import_module("lightning_sv.__main__")
    sys.argv = [str(program.__file__), *request["argv"]]
    sys.path[0] = request["cwd"]


if __name__ == "__main__":
    for needed in _NEEDED:
        import_module(needed)
    _become(_serve(Connection(int(sys.argv[1]))))
    sys.modules["__main__"].cli()
