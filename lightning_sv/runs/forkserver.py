"""Fork runs from one process that has done the imports: `python -m lightning_sv.runs.forkserver FD`.

    server: "ready"   owner: {"argv", "log", "cwd", "env"}   server: {"pid"}, and when the run has ended {"pid", "code"}

A run has its own process and session, as with `python -m lightning_sv`, but starts seconds faster. multiprocessing's
forkserver would import the caller's main module in every run, which repeats a script that calls `compare` without a
main guard. A signal to the caller's process group would also kill that server, but not its runs.
"""

import os
import signal
import subprocess
import sys
import warnings
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_POLL_S = 0.05
#: modules that a run imports, by name, because some belong to higher layers; without the user's modules
_NEEDED = (
    "litdata",
    "litdata.streaming.item_loader",
    "torch.utils.tensorboard",
    "lightning_sv.cli.fit",
    "lightning_sv.analysis.run_plot",
)


class ForkServer:
    """Process from which runs are forked. If the owner ends, it asks its runs to stop, and ends."""

    def __init__(self) -> None:
        # Threads and CUDA do not survive a fork: use one thread, and count GPUs by NVML, without initializing CUDA.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=env,
                start_new_session=True,  # only the owner receives Ctrl-C and signals to its group
            )
        self.pid = self._process.pid
        self._ready = False
        self._running: dict[int, ForkedRun] = {}

    def start(self, argv: list[str], *, log: Path, env: dict[str, str]) -> "ForkedRun":
        """Start a run that appends its output to `log`; the first start waits for the imports."""
        run = ForkedRun(self)
        try:
            if not self._ready:
                self._pipe.recv()
                self._ready = True  # before that an interrupt must not leave a run behind
            self._pipe.send({"argv": argv, "log": str(log.resolve()), "cwd": str(Path.cwd()), "env": env})
            while "code" in (message := self._pipe.recv()):
                self._running.pop(message["pid"]).returncode = message["code"]
            run.pid = message["pid"]
            self._running[run.pid] = run
        except (EOFError, OSError):
            self._lose()
            run.returncode = -signal.SIGKILL
        return run

    def read(self) -> None:
        """Read which runs have ended."""
        try:
            while self._pipe.poll():
                message = self._pipe.recv()
                self._running.pop(message["pid"]).returncode = message["code"]
        except (EOFError, OSError):
            self._lose()

    def _lose(self) -> None:
        """Kill all runs, because their ends are unknown without the server; they resume from their checkpoints."""
        for pid, run in self._running.items():
            signal_group(pid, signal.SIGKILL)
            run.returncode = -signal.SIGKILL
        self._running = {}

    def close(self) -> None:
        """End the server and its runs."""
        self._pipe.close()
        if not self._ready:  # do not wait for its imports
            self._process.kill()
        self._process.wait()


class ForkedRun:
    """A run of a `ForkServer`, similar to a `subprocess.Popen`."""

    def __init__(self, server: ForkServer):
        self._server = server
        self.pid = 0
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the run continues."""
        if self.returncode is None:
            self._server.read()
        return self.returncode


def signal_group(pid: int, number: int) -> None:
    """Send a signal to a process and its children."""
    for send in (os.killpg, os.kill):
        try:
            return send(pid, number)
        except ProcessLookupError:  # it does not lead a group yet, or has just ended
            continue


def _serve(owner: Connection) -> dict[str, Any]:
    """Fork a run per request until the owner ends; return the request in the forked process."""
    # Python counts pyarrow's jemalloc thread, which a library may start on import, and which holds no lock in a fork.
    warnings.filterwarnings("ignore", ".*is multi-threaded, use of fork", DeprecationWarning)
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
    except (EOFError, OSError):  # the owner has ended, perhaps by SIGKILL; its runs write a checkpoint and end
        for pid in children:
            signal_group(pid, signal.SIGTERM)
        os._exit(0)  # skip the cleanup of the interpreter, which takes a second


def _become(request: dict[str, Any]) -> None:
    """Give the forked process the state of `python -m lightning_sv` with these arguments."""
    os.setsid()
    import torch

    os.chdir(request["cwd"])
    with open(request["log"], "ab") as log:  # noqa: PTH123
        for target in (1, 2):
            os.dup2(log.fileno(), target)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(request["env"])
    # libgomp has read the server's environment
    torch.set_num_threads(int(request["env"]["OMP_NUM_THREADS"]))
    # Lightning starts the processes of further devices with the command line of this one.
    program = sys.modules["__main__"] = import_module("lightning_sv.__main__")
    sys.argv = [str(program.__file__), *request["argv"]]
    sys.path[0] = request["cwd"]


if __name__ == "__main__":
    for needed in _NEEDED:
        import_module(needed)
    _become(_serve(Connection(int(sys.argv[1]))))
    sys.modules["__main__"].cli()
