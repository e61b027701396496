"""Encoding of parts in order, in processes of this machine, until the corpus has its limit."""

import logging
import math
import os
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from functools import cache
from itertools import takewhile
from multiprocessing import parent_process
from pathlib import Path
from threading import Thread

from lightning_sv.corpus.encode import encode_part
from lightning_sv.corpus.job import Job
from lightning_sv.corpus.parts import Part
from lightning_sv.corpus.progress import phase
from lightning_sv.corpus.selection import Selection
from lightning_sv.corpus.spawn import WorkerContext
from lightning_sv.errors import RunError

log = logging.getLogger(__name__)

#: submitted parts per worker: one that it encodes, and one for which it need not wait
_SUBMITTED = 2


def encode_enough(job: Job, workers: int, *, shown: bool) -> Selection:
    """Encode the first parts of a job until they have `max_bytes` or `max_tokens`.

    Args:
        job: the preparation
        workers: number of processes; with 1, or with one part left, this process encodes
        shown: if True, show a progress bar

    Returns:
        The documents of the corpus.

    Raises:
        ConfigError: the text cannot be encoded
        RunError: a worker died
    """
    config = job.config
    max_bytes = config.limit or math.inf
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
            if len(job.parts) > 1:
                log.info("part %s of %d is complete", part.path.name, len(job.parts))
            summary = part.summary()
            text_bytes += summary["bytes"]
            tokens += summary["tokens"]
            # less without duplicates, for which a search takes longer
            if text_bytes > max_bytes or tokens > max_tokens:
                selection = Selection.of(job.parts[:count], config)
                if selection.is_limited:
                    return selection
    return Selection.of(job.parts, config)


def _encoded(job: Job, workers: int) -> Generator[Part]:
    """Yield the parts of a job in order, each when it is complete."""
    complete = list(takewhile(Part.is_complete, job.parts))
    yield from complete
    left = range(len(complete), len(job.parts))
    n_processes = min(workers, len(left))
    if n_processes > 1:
        yield from _in_processes(job, left, n_processes)
        return
    for number in left:
        _encode(job, job.parts[number])
        yield job.parts[number]


def _in_processes(job: Job, numbers: range, workers: int) -> Iterator[Part]:
    # spawned, because the threads of the tokenizer's library do not survive a fork
    context = WorkerContext()
    with ProcessPoolExecutor(workers, context, _start_worker) as pool:
        try:
            for number in _completed(pool, job.folder, numbers, _SUBMITTED * workers):
                yield job.parts[number]
        except BrokenProcessPool:
            found = "a worker died, perhaps for lack of memory"
            raise RunError(f"{found}; start again, with fewer --workers.") from None
        finally:
            # After an error, Ctrl-C or a limit nothing waits for the parts that are submitted;
            # they are written atomically, so the next start encodes them.
            context.kill()


def _completed(pool: ProcessPoolExecutor, folder: Path, numbers: range, most: int) -> Iterator[int]:
    """Yield the numbers of parts in order, each when it is encoded; submit at most `most`."""
    submitted: deque[Future[int]] = deque()
    for number in numbers:
        submitted.append(pool.submit(_encode_in_worker, folder, number))
        if len(submitted) == most:
            yield submitted.popleft().result()
    for future in submitted:
        yield future.result()


def _start_worker() -> None:
    """Prepare this process for parts."""
    # The pool ends no worker if this process's parent is killed.
    Thread(target=_end_with_parent, daemon=True).start()
    # One thread per process: several processes share the cores better than the threads of the
    # libraries.
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(folder: Path, number: int) -> int:
    job = _loaded(folder)
    _encode(job, job.parts[number])
    return number


@cache
def _loaded(folder: Path) -> Job:
    """Return the job in a folder, loaded with the first part so that an error is that part's."""
    return Job.load(folder)


def _encode(job: Job, part: Part) -> None:
    if not part.is_complete():  # the workers of a killed start complete parts out of order
        encode_part(job, part)
