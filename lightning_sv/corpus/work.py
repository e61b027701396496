"""Encoding of parts in order, in processes of this machine, until the corpus has its limit."""

import logging
import math
import os
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from multiprocessing import get_context, parent_process
from threading import Thread

from lightning_sv.corpus.encode import encode_part
from lightning_sv.corpus.job import Job
from lightning_sv.corpus.parts import Part
from lightning_sv.corpus.progress import phase
from lightning_sv.corpus.selection import Selection
from lightning_sv.corpus.spawn import unattended
from lightning_sv.errors import RunError

log = logging.getLogger(__name__)

#: submitted parts per worker: one that it encodes, and one for which it need not wait
_SUBMITTED = 2
_job_of_worker: Job


def encode_enough(job: Job, workers: int, *, shown: bool) -> Selection:
    """Encode the first parts of a job until they have `max_bytes` or `max_tokens`.

    Args:
        job: the preparation
        workers: number of processes; with 1, or one part, this process encodes
        shown: if True, show a progress bar

    Returns:
        The documents of the corpus.

    Raises:
        ConfigError: the text cannot be encoded
        RunError: a worker died
    """
    config = job.config
    max_bytes = config.limit
    max_tokens = config.max_tokens or math.inf
    all_bytes = sum(part.n_bytes for part in job.parts)
    text_bytes = 0
    tokens = 0
    with (
        phase("encoding", min(all_bytes, max_bytes), shown=shown) as advance,
        closing(_encoded(job, workers)) as parts,
    ):
        for count, part in enumerate(parts, 1):
            advance(part.n_bytes)
            log.info("part %s of %d is complete", part.path.name, len(job.parts))
            documents = part.documents()
            text_bytes += int(documents["train_bytes"].sum() + documents["val_bytes"].sum())
            tokens += int(documents["train_tokens"].sum() + documents["val_tokens"].sum())
            # less without duplicates, for which a search takes longer
            if text_bytes > max_bytes or tokens > max_tokens:
                selection = Selection.of(job.parts[:count], config)
                if selection.is_limited:
                    return selection
    return Selection.of(job.parts, config)


def _encoded(job: Job, workers: int) -> Generator[Part]:
    """Yield the parts of a job in order, each when it is complete."""
    n_processes = min(workers, len(job.parts))
    if n_processes > 1:
        yield from _in_processes(job, n_processes)
        return
    for part in job.parts:
        yield encode_part(job, part)


def _in_processes(job: Job, workers: int) -> Iterator[Part]:
    """Yield the parts in order from processes of this machine, for which few are submitted."""
    submitted: deque[Future[Part]] = deque()
    with _pool(job, workers) as pool:
        for part in job.parts:
            with unattended():  # submitting may start a process
                submitted.append(pool.submit(_encode_in_worker, part))
            if len(submitted) == _SUBMITTED * workers:
                yield submitted.popleft().result()
        for future in submitted:
            yield future.result()


@contextmanager
def _pool(job: Job, workers: int) -> Iterator[ProcessPoolExecutor]:
    """Give a pool of processes for a job, which are killed at the end.

    After an error, Ctrl-C or a limit nothing waits for the parts that are submitted; they are
    written atomically, so the next start encodes them.

    Raises:
        RunError: a worker died
    """
    context = get_context("spawn")  # the threads of the tokenizer's library do not survive a fork
    with ProcessPoolExecutor(workers, context, _start_worker, (job,)) as pool:
        try:
            yield pool
        except BrokenProcessPool:
            found = "a worker died, perhaps for lack of memory"
            raise RunError(f"{found}; start again, with fewer --workers.") from None
        finally:
            processes = pool._processes or {}  # Python 3.14 has `pool.kill_workers`
            for process in list(processes.values()):
                process.kill()


def _start_worker(job: Job) -> None:
    """Prepare this process for parts of a job."""
    # The pool ends no worker if this process's parent is killed.
    Thread(target=_end_with_parent, daemon=True).start()
    # One thread per process: several processes share the cores better than the threads of the
    # libraries.
    os.environ["RAYON_NUM_THREADS"] = "1"
    global _job_of_worker
    _job_of_worker = job


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(part: Part) -> Part:
    return encode_part(_job_of_worker, part)
