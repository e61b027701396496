"""Encoding of parts in order, in processes of this machine, until the corpus has its limit."""

import logging
import math
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from multiprocessing import parent_process
from pathlib import Path
from threading import Thread

from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.job import Job
from lightning_sv.corpus.parts import Part, encode_part
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
    size = _Size()
    all_bytes = sum(part.n_bytes for part in job.parts)
    with (
        phase("encoding", all_bytes, shown=shown) as advance,
        closing(_encoded(job, workers, advance)) as parts,
    ):
        for count, part in enumerate(parts, 1):
            size.add(part)
            selection = _limited(job, count, size)
            if selection is not None:
                return selection
            advance(0, total=min(size.needed_bytes(job.config), all_bytes))
    return Selection.of(job.parts, job.config)


@dataclass
class _Size:
    """Size of some parts.

    Attributes:
        source_bytes: bytes of their slices, e.g. of compressed files
        text_bytes: bytes of their text, duplicates included
        tokens: tokens of both splits, duplicates between parts included
    """

    source_bytes: int = 0
    text_bytes: int = 0
    tokens: int = 0

    def add(self, part: Part) -> None:
        """Add a complete part."""
        summary = part.summary()
        self.source_bytes += part.n_bytes
        self.text_bytes += summary["bytes"]
        self.tokens += summary["tokens"]

    def share(self, config: CorpusConfig) -> float:
        """Return the largest fraction of a limit that the parts may reach, 0 without limits."""
        text = self.text_bytes / (config.limit or math.inf)
        return max(text, self.tokens / (config.max_tokens or math.inf))

    def needed_bytes(self, config: CorpusConfig) -> float:
        """Return the bytes of slices that reach a limit, inf without limits."""
        share = self.share(config)
        return self.source_bytes / share if share else math.inf


def _limited(job: Job, count: int, size: _Size) -> Selection | None:
    """Return the documents of the first `count` parts if they reach a limit, or None."""
    if size.share(job.config) <= 1:  # without the search for duplicates, which takes longer
        return None
    selection = Selection.of(job.parts[:count], job.config)
    return selection if selection.is_limited else None


def _encoded(job: Job, workers: int, advance: Callable[[int], None]) -> Generator[Part]:
    """Yield the parts of a job in order, each when it is complete; advance a bar by their bytes."""
    n_complete = 0
    for part in job.parts:
        if not part.is_complete():
            break
        n_complete += 1
        advance(part.n_bytes)
        yield part

    left = range(n_complete, len(job.parts))
    n_processes = min(workers, len(left))
    if n_processes > 1:
        yield from _in_processes(job, left, n_processes, advance)
    else:
        yield from _here(job, left, advance)


def _here(job: Job, numbers: range, advance: Callable[[int], None]) -> Iterator[Part]:
    for number in numbers:
        part = job.parts[number]
        bar = _PartBar(part.n_bytes, advance)
        _encode(job, number, bar.advance)
        bar.finish()
        _log_complete(job, number)
        yield part


class _PartBar:
    """The share of one part in a progress bar."""

    def __init__(self, n_bytes: int, advance: Callable[[int], None]) -> None:
        self._left = n_bytes
        self._advance = advance

    def advance(self, n_bytes: int) -> None:
        """Advance by bytes of text, which may be more than those of a compressed file."""
        shown = min(n_bytes, self._left)
        self._left -= shown
        self._advance(shown)

    def finish(self) -> None:
        """Advance by what is left, e.g. by duplicates and by the syntax of JSON."""
        self.advance(self._left)


def _in_processes(
    job: Job, numbers: range, workers: int, advance: Callable[[int], None]
) -> Iterator[Part]:
    # spawned, because the threads of the tokenizer's library do not survive a fork
    context = WorkerContext()
    with ProcessPoolExecutor(workers, context, _start_worker) as pool:
        try:
            for number in _completed(pool, job.folder, numbers, _SUBMITTED * workers):
                part = job.parts[number]
                advance(part.n_bytes)
                _log_complete(job, number)
                yield part
        except BrokenProcessPool:
            found = "a worker died, perhaps for lack of memory"
            raise RunError(f"{found}; start again, with fewer --workers.") from None
        finally:
            # After an error, Ctrl-C or a limit nothing waits for the parts that are submitted;
            # they are written atomically, so the next start encodes them.
            context.kill()


def _completed(pool: ProcessPoolExecutor, folder: Path, numbers: range, most: int) -> Iterator[int]:
    """Yield the numbers of parts in order, each when it is encoded; submit at most `most`."""
    submitted: deque[tuple[int, Future[None]]] = deque()
    for number in numbers:
        if len(submitted) == most:
            yield _wait(submitted)
        submitted.append((number, pool.submit(_encode_in_worker, folder, number)))
    while submitted:
        yield _wait(submitted)


def _wait(submitted: deque[tuple[int, Future[None]]]) -> int:
    """Wait for the first submitted part; return its number."""
    number, future = submitted.popleft()
    future.result()
    return number


def _log_complete(job: Job, number: int) -> None:
    if len(job.parts) > 1:
        log.info("part %s of %d is complete", job.parts[number].path.name, len(job.parts))


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


def _encode_in_worker(folder: Path, number: int) -> None:
    _encode(_loaded(folder), number)


@cache
def _loaded(folder: Path) -> Job:
    """Return the job in a folder, loaded with the first part so that an error is that part's."""
    return Job.load(folder)


def _encode(job: Job, number: int, step: Callable[[int], None] | None = None) -> None:
    part = job.parts[number]
    if not part.is_complete():  # the workers of a killed start complete parts out of order
        encode_part(part, job.source, job.encoding, step)
