"""How processes and threads are started that must not run the main script, or get signals."""

import signal
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def unattended() -> Iterator[None]:
    """Let processes that are spawned here find no main script to import, and leave Ctrl-C to us.

    A spawned process first imports the file of `__main__`. A script without
    `if __name__ == "__main__":` would then prepare its corpus again in each worker, and wait for
    ever for the lock that its parent holds.

    A process inherits a mask and no handler, because a handler can only be set by the main thread,
    and inherited only if it ignores the signal; then this process would ignore it too.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")  # without a file
    try:
        # multiprocessing's resource tracker unblocks the signal when it starts, but the locks of
        # the pool have started it before.
        with blocked({signal.SIGINT}):
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
