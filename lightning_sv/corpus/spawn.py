"""Worker processes that do not import the main script, ignore Ctrl-C, and can be killed."""

import signal
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from multiprocessing import active_children
from multiprocessing.context import SpawnContext, SpawnProcess
from types import ModuleType
from typing import Any


class WorkerProcess(SpawnProcess):
    """A spawned process whose work is in an installed module, not in the main script."""

    def start(self) -> None:
        """Start the process; its parent handles Ctrl-C.

        It inherits a mask and no handler, because a handler can only be set by the main thread, and
        inherited only if it ignores the signal; then this process would ignore it too.
        """
        # multiprocessing's resource tracker unblocks the signal when it starts, but the locks of
        # the pool have started it before.
        with _without_main_script(), blocked({signal.SIGINT}):
            super().start()


class WorkerContext(SpawnContext):
    """The context of one pool, which knows the processes of this pool."""

    def __init__(self) -> None:
        super().__init__()
        self._created: list[WorkerProcess] = []

    def Process(self, *args: Any, **settings: Any) -> WorkerProcess:  # type: ignore[override]
        """Create a process; the pool calls this."""
        process = WorkerProcess(*args, **settings)
        self._created.append(process)
        return process

    def kill(self) -> None:
        """Kill the running processes of the pool."""
        for process in set(active_children()).intersection(self._created):
            process.kill()


@contextmanager
def _without_main_script() -> Iterator[None]:
    """Let a process that is spawned find no main script to import.

    A spawned process first imports the file of `__main__`. A script without
    `if __name__ == "__main__":` would then prepare its corpus again in each worker, and wait for
    ever for the lock that its parent holds.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")  # without a file
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def blocked(signals: Collection[signal.Signals]) -> Iterator[None]:
    """Let processes and threads that are started here inherit a mask that blocks signals."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
