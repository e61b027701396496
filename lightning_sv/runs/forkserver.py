"""Runs forked from one process that has done the imports: `python -m lightning_sv.runs.forkserver FD`.

    {"argv", "log", "cwd", "env"}  ->  {"pid"}, and when the run has ended {"pid", "code"}

A run is a process and a session of its own as `python -m lightning_sv` would be, but for the seconds before its first
line. multiprocessing's forkserver would import the caller's main module in every run, so that a script that calls
`compare` at its top would start it again. It dies with a signal to the caller's process group while its runs, which
then count as ended, go on. Its `start` waits for the imports, during which an interrupt leaves a run behind.
"""

import os
import signal
import subprocess
import sys
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

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
        self._waiting: list[ForkedRun] = []  # asked for, not yet forked
        self._running: dict[int, ForkedRun] = {}

    def start(self, argv: list[str], *, log: Path, env: dict[str, str]) -> "ForkedRun":
        """Start a run; its output is added to `log`.

        Args:
            argv: of `lightning-sv`, e.g. ``fit --config ...``
            log: where stdout and stderr go
            env: all of the run's environment
        """
        request = {"argv": argv, "log": str(log.resolve()), "cwd": str(Path.cwd()), "env": env}
        process = ForkedRun(self)
        self._waiting.append(process)
        try:
            self._pipe.send(request)
        except OSError:
            self._lose()
        return process

    def read(self) -> None:
        """Take note of what was started and what has ended."""
        while (said := self._said()) is not None:
            if "code" in said:
                self._running.pop(said["pid"]).returncode = said["code"]
            else:
                process = self._waiting.pop(0)
                process.pid, self._running[said["pid"]] = said["pid"], process
                if process.asked is not None:
                    process.send(process.asked)

    def _said(self) -> dict[str, int] | None:
        """The server's next word; None where there is none yet, or never will be."""
        try:
            said: dict[str, int] | None = self._pipe.recv() if self._pipe.poll() else None
        except (EOFError, OSError):
            self._lose()
            return None
        return said

    def _lose(self) -> None:
        """Without the server nobody can tell when a run ends: they are killed, and resume from their checkpoints."""
        for process in self._running.values():
            process.send(signal.SIGKILL)
        for process in [*self._waiting, *self._running.values()]:
            process.returncode = -signal.SIGKILL
        self._waiting, self._running = [], {}

    def forget(self) -> None:
        """Give up what is not forked yet: while the server imports, that would take seconds."""
        if not self._running:
            self._process.kill()
            self._process.wait()
            self._lose()

    def close(self) -> None:
        """End the server, and what still runs."""
        self._pipe.close()
        self._process.wait()


class ForkedRun:
    """A run of a `ForkServer`, as far as it is like a `subprocess.Popen`."""

    def __init__(self, server: ForkServer):
        self._server = server
        self.pid: int | None = None
        self.returncode: int | None = None
        #: the signal to be sent once it is forked
        self.asked: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            self._server.read()
        return self.returncode

    def send(self, number: int) -> None:
        """Send a signal to the run and what it has started."""
        if self.returncode is not None:
            return
        if self.pid is None:
            self.asked = number
            self._server.forget()
            return
        for send in (os.killpg, os.kill):
            try:
                return send(self.pid, number)
            except ProcessLookupError:  # it has just been forked, and leads no group yet, or has just ended
                continue


def _serve(owner: Connection) -> dict[str, Any]:
    """Fork a run for every request of the owner, until it ends; return the request in the forked process."""
    children: set[int] = set()
    while True:
        if (request := _asked(owner, children)) is not None:
            pid = os.fork()
            if pid == 0:
                owner.close()
                return request
            children.add(pid)
            _say(owner, {"pid": pid})
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children.remove(pid)
                _say(owner, {"pid": pid, "code": os.waitstatus_to_exitcode(status)})


def _asked(owner: Connection, children: set[int]) -> dict[str, Any] | None:
    try:
        return owner.recv() if owner.poll(_POLL_S if children else None) else None
    except (EOFError, OSError):
        _stop(children)


def _say(owner: Connection, word: dict[str, int]) -> None:
    try:
        owner.send(word)
    except OSError:
        return  # the owner has ended: the next question to it says so


def _stop(children: set[int]) -> NoReturn:
    """The owner has ended, perhaps by SIGKILL: its runs write a checkpoint and end."""
    for pid in children:
        try:
            os.killpg(pid, signal.SIGTERM)
        except ProcessLookupError:
            continue
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
