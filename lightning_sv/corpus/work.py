"""Encoding of parts in order, in processes of this machine, until the corpus has its limit."""

import logging
import math
import os
import signal
from collections.abc import Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from itertools import takewhile
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread

from lightning_sv.corpus.config import CorpusConfig
from lightning_sv.corpus.job import Job
from lightning_sv.corpus.parts import Part, encode_part
from lightning_sv.corpus.progress import phase
from lightning_sv.corpus.selection import Selection
from lightning_sv.errors import RunError

log = logging.getLogger(__name__)

#: In a worker, the preparation of which it encodes parts.
_job: Job


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
        closing(_encoded(job, workers)) as parts,
    ):
        for count, part in enumerate(parts, 1):
            size.add(part)
            share = size.share(job.config)
            if share > 1:
                selection = Selection.of_first(job, count)
                if selection.is_limited:
                    return selection
            needed_bytes = size.source_bytes / share if share else math.inf
            advance(part.n_bytes, total=min(needed_bytes, all_bytes))
    return Selection.of_first(job, len(job.parts))


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


def _encoded(job: Job, workers: int) -> Generator[Part]:
    """Yield the parts of a job in order, each when it is complete."""
    complete = list(takewhile(Part.is_complete, job.parts))
    yield from complete
    left = job.parts[len(complete) :]
    n_processes = min(workers, len(left))
    encoded = _in_processes(job, left, n_processes) if n_processes > 1 else _here(job, left)
    for part in encoded:
        if len(job.parts) > 1:
            log.info("part %s of %d is complete", part.path.name, len(job.parts))
        yield part


def _here(job: Job, parts: list[Part]) -> Iterator[Part]:
    for part in parts:
        _encode(job, part)
        yield part


def _in_processes(job: Job, parts: list[Part], workers: int) -> Iterator[Part]:
    # spawned, because the threads of the tokenizer's library do not survive a fork
    context = get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start_worker, (job.folder,)) as pool:
        try:
            yield from pool.map(_encode_in_worker, parts)
        except BrokenProcessPool:
            found = "a worker died, perhaps for lack of memory"
            raise RunError(f"{found}; start again, with fewer --workers.") from None
        finally:
            pool.shutdown(cancel_futures=True)


def _start_worker(folder: Path) -> None:
    """Prepare this process for the parts of the job in a folder."""
    global _job
    # The pool ends no worker if this process's parent is killed.
    Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    # One thread per process: several processes share the cores better than the threads of the
    # libraries.
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _job = Job.load(folder)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(part: Part) -> Part:
    _encode(_job, part)
    return part


def _encode(job: Job, part: Part) -> None:
    if not part.is_complete():  # the workers of a killed start complete parts out of order
        encode_part(part, job.source, job.encoding)
