"""Encoding of the parts by any number of processes, on machines with the same file system.

Every process runs the same loop: it takes a part that is neither complete nor locked, and encodes
it under the part's lock. The operating system releases the lock of a process that ends or dies, so
its part is taken over by another. No process distributes work, and none has to know of the others.

`python -m lightning_sv.corpus.work FOLDER` is such a process. `prepare` starts some of them.
"""

import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from filelock import Timeout

from lightning_sv.atomic import acquire_lock
from lightning_sv.corpus.job import Job
from lightning_sv.corpus.parts import Part, encode_part
from lightning_sv.errors import ConfigError, RunError

log = logging.getLogger(__name__)

#: exit codes of a worker that has printed why the text cannot be encoded, or why a file cannot be
#: written
EXIT_TEXT = 2
EXIT_DISK = 3
#: seconds between two looks at the parts that the workers have completed
_POLL_S = 0.2
#: timeout of a lock that waits for as long as it takes
_NO_LIMIT = -1.0


def encode_parts(job: Job, count: int, workers: int, step: Callable[[int], None]) -> None:
    """Encode the first `count` parts of a job; return when all of them are complete.

    Args:
        job: the preparation
        count: number of parts
        workers: processes on this machine; with 1, or with one part left, this process encodes
        step: called with the bytes of slices that have been encoded, in total those of the parts

    Raises:
        ConfigError: the text cannot be encoded
        RunError: all workers died
    """
    parts = job.parts[:count]
    left = [part for part in parts if not part.is_complete()]
    n_processes = min(workers, len(left))
    if n_processes <= 1:
        work(job, parts, step)
    else:
        _encode_in_processes(job, count, left, n_processes, step)


def work(job: Job, parts: list[Part], step: Callable[[int], None]) -> None:
    """Encode the parts that no other process encodes; then wait for the others.

    A part whose process ended before it was complete is encoded here.
    """
    for timeout in (0, _NO_LIMIT):
        for part in parts:
            if not job.is_open():  # another process has published the corpus
                return
            if not part.is_complete():
                _encode_unless_locked(job, part, step, timeout)


def _encode_unless_locked(
    job: Job, part: Part, step: Callable[[int], None], timeout: float
) -> None:
    """Encode a part under its lock, unless a different process holds it for `timeout` seconds."""
    try:
        lock = acquire_lock(part.path.with_suffix(".lock"), timeout)
    except Timeout:
        return
    try:
        if not part.is_complete():  # the process that held the lock may have completed it
            _encode_with_steps(job, part, step)
            _log_complete(job, part)
    finally:
        lock.release()


def _encode_with_steps(job: Job, part: Part, step: Callable[[int], None]) -> None:
    """Encode a part; the sum of the steps is its `n_bytes`, whatever the size of its text.

    A compressed file, or one with more than text, has a different size than its text.
    """
    left = part.n_bytes

    def step_of_text(n_bytes: int) -> None:
        nonlocal left
        shown = min(n_bytes, left)
        left -= shown
        step(shown)

    encode_part(part, job.source, job.encoding, step_of_text)
    step(left)


def _log_complete(job: Job, part: Part) -> None:
    if len(job.parts) > 1:
        log.info("part %s of %d is complete", part.path.name, len(job.parts))


def _encode_in_processes(
    job: Job, count: int, left: list[Part], workers: int, step: Callable[[int], None]
) -> None:
    running: list[_Worker] = []
    with ExitStack() as stack:
        for _ in range(workers):
            running.append(stack.enter_context(_Worker(job.folder, count)))
        while running:
            left = _report_completed(job, left, step)
            for worker in list(running):
                if worker.has_ended():
                    worker.check()
                    running.remove(worker)
            time.sleep(_POLL_S)

    left = _report_completed(job, left, step)
    if left and job.is_open():
        found = "all workers died, perhaps for lack of memory"
        raise RunError(f"{found}; start again, with fewer --workers.")


class _Worker:
    """A process that encodes parts of the job in a folder."""

    def __init__(self, folder: Path, count: int) -> None:
        # One thread per process: several processes share the cores better than the threads of the
        # libraries.
        threads = {
            "RAYON_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
        # -P: without the current folder, which -m would put first
        command = [sys.executable, "-P", "-m", __name__, str(folder), str(count)]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in __exit__)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stderr=self.errors,
            env=os.environ | threads | paths,
        )

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *error: object) -> None:
        """End the process, if it has not ended."""
        self.process.kill()
        self.process.communicate()
        self.errors.close()

    def has_ended(self) -> bool:
        """Return True if the process has ended."""
        return self.process.poll() is not None

    def check(self) -> None:
        """Raise the error with which the process ended.

        If it died, only log a warning, because others take its part.

        Raises:
            ConfigError: the text cannot be encoded
            OSError: a file cannot be written
        """
        self.errors.seek(0)
        message = self.errors.read().strip()
        sentence = message.rpartition("\n")[2]  # after warnings, such as runpy's about this module
        code = self.process.returncode
        if code == EXIT_TEXT:
            raise ConfigError(sentence)
        if code == EXIT_DISK:
            raise OSError(sentence)
        if code:
            log.warning("a worker died (%s); the others go on. %s", code, message)


def _report_completed(job: Job, left: list[Part], step: Callable[[int], None]) -> list[Part]:
    """Log each part that has been completed, and call `step` for it; return the others."""
    still = []
    for part in left:
        if part.is_complete():
            step(part.n_bytes)
            _log_complete(job, part)
        else:
            still.append(part)
    return still


def main(folder: str, count: str) -> int:
    """Encode the first `count` parts of the job in a folder."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    job = Job.load(Path(folder))
    try:
        work(job, job.parts[: int(count)], lambda n_bytes: None)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_TEXT
    except OSError as error:
        print(error, file=sys.stderr)
        return EXIT_DISK
    return 0


def _end_with_parent() -> None:
    """End this process when the one that started it ends, even by a signal: its pipe closes."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
